"""What a checkpoint holds.

    index.json               every file with its size and checksum, and where each tensor lies
    state.json               iteration, position in the data, configuration, schedule, vocabulary, operations
    model.safetensors        every parameter by its global name, in the dtype of the model
    optimizer.safetensors    `master/NAME` (fp32 weights, where the model is not fp32), `exp_avg/NAME`, ...
                             (of several processes each writes its own: model-00001-of-00004.safetensors, ...)
    tokenizer/               the tokenizer's files, so that the folder can be used on its own

Nothing in it can run code when loaded: tensors are safetensors, everything else is JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron.checkpoint.foreign import Assembled
from megatron.checkpoint.manifest import Manifest, read_manifest
from megatron.checkpoint.pieces import Pieces
from megatron.checkpoint.storage import folder_of
from megatron.flags import LARGEST, Config, InputError, flag_name
from megatron.model.config import ModelConfig
from megatron.optim import gate, scaler
from megatron.tokenizer.config import TokenizerConfig

C = TypeVar("C", bound=Config)

FORMAT = "megatron-checkpoint"
VERSION = 1
# An empty file: the evaluation that was due when the checkpoint was saved is done.
EVALUATED = "evaluated"

# Fields of ModelConfig that may differ between a checkpoint and the run that loads it.
FREE = {
    "attention_dropout",
    "fp32_residual_connection",
    "hidden_dropout",
    "init_method_std",
    "init_method_xavier_uniform",
    "mask_padded_vocab",
}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint found on disk, its state read, its tensors not yet.

    Attributes:
        manifest: None if the files are not ours.
        foreign: then the tensors of each kind, "model" and where there is one "optimizer".
        passed_over: what is wrong with newer ones that were not taken.
        notes: what whoever uses a foreign one should know, a sentence each.
    """

    folder: Path
    state: dict[str, Any]
    manifest: Manifest | None
    foreign: Mapping[str, Assembled] = dataclasses.field(default_factory=dict)
    passed_over: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def iteration(self) -> int:
        return self.state["iteration"]

    @property
    def kinds(self) -> list[str]:
        """The kinds of tensors that it has: "model", "optimizer"."""
        return list(self.foreign if self.manifest is None else self.manifest.tensors)

    def pieces(self, kind: str) -> Pieces | Assembled:
        """The tensors of a kind."""
        if self.manifest is None:
            return self.foreign[kind]
        return Pieces(self.folder, self.manifest.tensors[kind])


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint whose files are all there, and as long as they were when written.

    Raises:
        InputError: they are not.
    """
    manifest = read_manifest(folder)
    manifest.check_sizes()
    if "state.json" not in manifest.files or "model" not in manifest.tensors:
        raise InputError(f"{folder / 'index.json'}: names no state.json, or no tensors of a model")
    manifest.verify(["state.json"])
    state = read_state(folder)
    if (folder / EVALUATED).exists():
        state["evaluation_due"] = False
    return Checkpoint(folder, state, manifest)


def read_state(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's state.json, its kind and version checked."""
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON ({error})") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise InputError(f"{path}: is not the state of a checkpoint of this program")
    if state.get("version") != VERSION:
        raise InputError(
            f"{path}: has format version {state.get('version')}; this program reads version {VERSION}"
        )
    for name, right in STATE_FIELDS.items():
        if not right(state.get(name)):
            raise InputError(f"{path}: {name!r} is missing or wrong: {str(state.get(name))[:60]}")
    if folder_of(folder.parent, state["iteration"]).name != folder.name:
        raise InputError(f"{path}: is of iteration {state['iteration']}, but lies in {folder.name}")
    return state


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_history(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, dict)
        and all(x is None or (type(x) in (int, float) and abs(x) < 1e300) for x in row.values())
        for row in value
    )


def _is_operations(value: Any) -> bool:
    """Whether `value` is an `Ops.kinds`; None, too, from before they were saved."""
    return value is None or (isinstance(value, list) and all(isinstance(kind, str) for kind in value))


# What state.json must hold, and how a value is told to be right.
STATE_FIELDS = {
    "task": lambda value: isinstance(value, str),
    "iteration": _is_count,
    "consumed_samples": _is_count,
    "train_samples": _is_count,
    "evaluation_due": lambda value: isinstance(value, bool),
    "bad_steps": _is_count,
    "history": _is_history,
    "spike_window": gate.is_state,
    "loss_scaler": scaler.is_state,
    "vocab_size": _is_count,
    "padded_vocab_size": _is_count,
    "optimizer_steps": lambda value: value is None or _is_count(value),
    "schedule": lambda value: isinstance(value, dict),
    "operations": _is_operations,
    "config": lambda value: isinstance(value, dict) and all(isinstance(v, dict) for v in value.values()),
}


def mark_evaluated(root: Path, iteration: int) -> None:
    """Note in the checkpoint of an iteration that the evaluation which was due when it was saved is done."""
    (folder_of(root, iteration) / EVALUATED).touch()


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """The architecture that a checkpoint was saved with."""
    return saved_config(checkpoint, "model", ModelConfig)


def saved_config(checkpoint: Checkpoint, part: str, config: type[C]) -> C:
    """A part of the configuration of the run that saved a checkpoint."""
    saved = checkpoint.state["config"].get(part, {})
    fields = {f.name for f in dataclasses.fields(config)}
    try:
        return config(**{name: value for name, value in saved.items() if name in fields})
    except InputError as error:
        raise InputError(f"{checkpoint.folder / 'state.json'}: {error}") from None


def saved_tokenizer(checkpoint: Checkpoint) -> TokenizerConfig:
    """The configuration of the tokenizer that was saved with a checkpoint, reading the files beside it."""
    saved = saved_config(checkpoint, "tokenizer", TokenizerConfig)
    if checkpoint.manifest is None:  # the files are named by their paths
        return saved
    folder = checkpoint.folder / "tokenizer"
    files = {}
    for name in ("vocab_file", "merge_file", "tokenizer_model"):
        path = getattr(saved, name)
        if path is not None:
            file = folder / Path(path).name
            # A tokenizer given as a directory was saved as the files in it.
            files[name] = str(file if file.exists() else folder)
    return dataclasses.replace(saved, **files)


def is_architecture(field: str, config: ModelConfig) -> bool:
    """Whether a field of this config is part of what its weights are, and cannot change while they last."""
    # Without a table of positions the model has no longest sequence of its own.
    has_longest = config.position_embedding_type == "learned_absolute"
    return field not in FREE and (has_longest or field != "max_position_embeddings")


def check_architecture(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise `InputError` naming the flags in which a run's model differs from the checkpoint's."""
    is_bert = checkpoint.state["task"].startswith("BERT")
    differing = [
        f"{flag} (checkpoint: {saved}, given: {given})"
        for flag, saved, given in differences(model_config(checkpoint), config, is_bert=is_bert)
    ]
    if differing:
        raise InputError(f"--load: {checkpoint.folder} holds another model: {'; '.join(differing)}")


def differences(a: ModelConfig, b: ModelConfig, *, is_bert: bool) -> list[tuple[str, Any, Any]]:
    """Each flag in which two architectures differ, and both its values."""
    same = {"group_query_attention"}  # which the number of groups tells
    # Two flags for one thing, which a gated MLP has not at all; but BERT's head heeds only one of them.
    tanh = [(config.tanh_gelu, is_bert and config.openai_gelu) for config in (a, b)]
    if tanh[0] == tanh[1] or (a.swiglu and b.swiglu and not is_bert):
        same |= {"bias_gelu_fusion", "openai_gelu"}
    return [
        (flag_name(field), getattr(a, field.name), getattr(b, field.name))
        for field in dataclasses.fields(ModelConfig)
        if is_architecture(field.name, b)
        and field.name not in same
        and getattr(a, field.name) != getattr(b, field.name)
    ]


def check_vocabulary(checkpoint: Checkpoint, vocab_size: int) -> None:
    """Raise `InputError` unless the tokenizer has as many ids as the one the checkpoint was trained with."""
    if checkpoint.state["vocab_size"] != vocab_size:
        raise InputError(
            f"--load: {checkpoint.folder} has a vocabulary of {checkpoint.state['vocab_size']} ids, but the "
            f"tokenizer has {vocab_size}; give the tokenizer that the checkpoint was trained with"
        )
