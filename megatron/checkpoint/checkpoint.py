"""The contents of a checkpoint, one folder per iteration.

    index.json               every file with its size and checksum, and the location of each tensor
    state.json               iteration, position in the data, configuration, schedule, vocabulary, operations
    model.safetensors        every parameter by its global name, in the dtype of the model
    optimizer.safetensors    `master/NAME` (fp32 weights of a half-precision model), `exp_avg/NAME`, ...
                             (several processes write a file each: model-00001-of-00004.safetensors, ...)
    tokenizer/               the tokenizer's files, so that the folder is self-contained

Loading a checkpoint cannot run code: tensors are safetensors, everything else is JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron.checkpoint.manifest import Manifest, read_manifest
from megatron.checkpoint.pieces import NativeTensors, TensorSource
from megatron.checkpoint.storage import folder_of
from megatron.errors import InputError
from megatron.flags import LARGEST, Config, flag_name
from megatron.model.config import ModelConfig
from megatron.model.moe_config import COMPUTATION
from megatron.tokenizer.base import read_json

C = TypeVar("C", bound=Config)

FORMAT = "megatron-checkpoint"
VERSION = 1
# An empty file which says that the evaluation pending when the checkpoint was saved has been done.
EVALUATED = "evaluated"

# Fields of ModelConfig that may differ between a checkpoint and the run that loads it.
NOT_ARCHITECTURE = frozenset(
    "attention_dropout fp32_residual_connection hidden_dropout init_method_std init_method_xavier_uniform "
    "mask_padded_vocab moe_aux_loss_coeff moe_expert_capacity_factor moe_router_bias_update_rate moe_router_dtype "
    "moe_router_load_balancing_type moe_token_drop_policy moe_z_loss_coeff mtp_loss_scaling_factor".split()
).union(COMPUTATION)
# Beginnings of fields that may differ with --finetune too: a model can learn longer sequences with another RoPE.
ROPE_FIELDS = ("rotary_base", "use_rope_scaling", "rope_scaling_", "yarn_", "mscale")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose state has been read and whose tensors have not.

    Attributes:
        tensors: a source for each kind that the checkpoint has, "model" and "optimizer".
        manifest: None if another program wrote the checkpoint.
        passed_over: errors of newer checkpoints that were skipped because they are damaged.
        notes: facts that the user of a converted checkpoint should know, a sentence each.
    """

    folder: Path
    state: dict[str, Any]
    tensors: Mapping[str, TensorSource]
    manifest: Manifest | None = None
    passed_over: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def iteration(self) -> int:
        return self.state["iteration"]

    def verify(self, *, weights_only: bool = False, part: slice = slice(None)) -> None:
        """Raise `InputError` unless the files, or a part of them, have their recorded checksums.

        Args:
            weights_only: leave out the optimizer's files.
        """
        if self.manifest is not None:
            skipped = "optimizer" if weights_only else " "  # files are named for the kind of their tensors
            names = [name for name in sorted(self.manifest.files) if not name.startswith(skipped)]
            self.manifest.verify(names[part])


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint in the native format, after checking that every file exists with its recorded size.

    Raises:
        InputError: a file is missing or has another size.
    """
    manifest = read_manifest(folder)
    manifest.check_sizes()
    if "state.json" not in manifest.files or "model" not in manifest.tensors:
        raise InputError(f"{folder / 'index.json'}: lists no state.json, or no tensors of a model")
    manifest.verify(["state.json"])
    state = read_state(folder)
    if (folder / EVALUATED).exists():
        state["evaluation_due"] = False
    tensors = {kind: NativeTensors(folder, index) for kind, index in manifest.tensors.items()}
    return Checkpoint(folder, state, tensors, manifest)


def read_state(folder: Path) -> dict[str, Any]:
    """Read and check state.json."""
    path = folder / "state.json"
    state = read_json(str(path))
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise InputError(f"{path}: is not the state of a checkpoint of this program")
    if state.get("version") != VERSION:
        raise InputError(
            f"{path}: has format version {state.get('version')}; this program reads version {VERSION}"
        )
    try:
        check_fields(state, FIELDS)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if folder_of(folder.parent, state["iteration"]).name != folder.name:
        raise InputError(f"{path}: is of iteration {state['iteration']}, but is in {folder.name}")
    return state


def check_fields(state: dict[str, Any], checks: Mapping[str, Callable[[Any], bool]]) -> None:
    """Raise `InputError` if a field of state.json is missing or fails its check."""
    for name, is_valid in checks.items():
        if not is_valid(state.get(name)):
            raise InputError(f"{name!r} is missing or wrong: {str(state.get(name))[:60]}")


def is_count(value: Any) -> bool:
    """True for a number of things."""
    return type(value) is int and 0 <= value <= LARGEST


# Fields of state.json that every reader of a checkpoint may use, each with a check of its value. `TrainState` checks
# those that only a resumed run uses. In older checkpoints operations is None.
FIELDS: dict[str, Callable[[Any], bool]] = {
    "task": lambda value: isinstance(value, str),
    "iteration": is_count,
    "consumed_samples": is_count,
    "train_samples": is_count,
    "vocab_size": is_count,
    "padded_vocab_size": is_count,
    "optimizer_steps": lambda value: value is None or is_count(value),
    "operations": lambda value: (
        value is None or (isinstance(value, list) and all(type(k) is str for k in value))
    ),
    "config": lambda value: isinstance(value, dict) and all(isinstance(v, dict) for v in value.values()),
}


def mark_evaluated(root: Path, iteration: int) -> None:
    """Record in a checkpoint that the evaluation pending when it was saved has been done."""
    (folder_of(root, iteration) / EVALUATED).touch()


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """The model's configuration in the run that saved a checkpoint."""
    return saved_config(checkpoint, "model", ModelConfig)


def saved_config(checkpoint: Checkpoint, section: str, config: type[C]) -> C:
    """A section of the configuration of the run that saved a checkpoint."""
    saved = checkpoint.state["config"].get(section, {})
    fields = {f.name for f in dataclasses.fields(config)}
    try:
        return config(**{name: value for name, value in saved.items() if name in fields})
    except InputError as error:
        raise InputError(f"{checkpoint.folder / 'state.json'}: {error}") from None


def is_architecture(field: str, config: ModelConfig) -> bool:
    """True for a field of the config that the weights fix: it cannot change when they are loaded."""
    # Only learned position embeddings limit the sequence length.
    has_positions = config.position_embedding_type == "learned_absolute"
    if field.startswith(ROPE_FIELDS) and config.position_embedding_type != "rope":
        return False
    return field not in NOT_ARCHITECTURE and (has_positions or field != "max_position_embeddings")


def check_architecture(checkpoint: Checkpoint, config: ModelConfig, *, finetune: bool = False) -> list[str]:
    """Raise `InputError` with the flags by which a run's architecture differs from the checkpoint's.

    Returns:
        The differences that --finetune allows, those of `ROPE_FIELDS`, as text.
    """
    before, is_bert = model_config(checkpoint), checkpoint.state["task"].startswith("BERT")
    rope: list[str] = []
    others: list[str] = []
    for flag, saved, given in differences(before, config, is_bert=is_bert):
        texts = rope if flag[2:].replace("-", "_").startswith(ROPE_FIELDS) else others
        texts.append(f"{flag} (checkpoint: {saved}, given: {given})")
    if others or (rope and not finetune):
        hint = "" if others else "; RoPE may change with --finetune, which starts from the weights alone"
        refused = "; ".join(others if finetune else others + rope)
        raise InputError(f"--load: {checkpoint.folder} holds another model: {refused}{hint}")
    length, original = before.max_position_embeddings, config.rope_scaling_original_length
    if config.use_rope_scaling and not before.use_rope_scaling and length != original:
        rope.append(f"checkpoint trained on {length} positions; --rope-scaling-original-length is {original}")
    return rope


def differences(a: ModelConfig, b: ModelConfig, *, is_bert: bool) -> list[tuple[str, Any, Any]]:
    """The flags by which two architectures differ, each with both values."""
    ignored = {"group_query_attention"}  # follows from num_query_groups
    # Both flags select the tanh form of GELU. SwiGLU has no GELU, and BERT's head uses only the second flag.
    tanh = [(config.tanh_gelu, is_bert and config.openai_gelu) for config in (a, b)]
    if tanh[0] == tanh[1] or (a.swiglu and b.swiglu and not is_bert):
        ignored |= {"bias_gelu_fusion", "openai_gelu"}
    if a.num_layers == b.num_layers and a.expert_layers(a.num_layers) == b.expert_layers(b.num_layers):
        ignored.add("moe_layer_freq")  # the same layers, written in another way
    if a.windows == b.windows:
        ignored |= {"window_size", "window_attn_skip_freq"}
    rows = []
    for field in dataclasses.fields(ModelConfig):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if x != y and is_architecture(field.name, b) and field.name not in ignored:
            rows.append((flag_name(field), x, y) if field.default is not True else (flag_name(field), y, x))
    return rows


def check_vocabulary(checkpoint: Checkpoint, vocab_size: int) -> None:
    """Raise `InputError` unless the tokenizer has as many ids as the checkpoint's."""
    if checkpoint.state["vocab_size"] != vocab_size:
        raise InputError(
            f"--load: {checkpoint.folder} has a vocabulary of {checkpoint.state['vocab_size']} ids, but the "
            f"tokenizer has {vocab_size}; give the tokenizer that the checkpoint was trained with"
        )
