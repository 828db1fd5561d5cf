"""What a checkpoint holds, saved and loaded.

    state.json               iteration, position in the data, configuration, schedule, vocabulary
    model.safetensors        every parameter by its global name, in the dtype of the model
    optimizer.safetensors    `master/NAME` (fp32 weights, where the model is not fp32), `exp_avg/NAME`, ...
    tokenizer/               the tokenizer's files, so that the folder can be used on its own

Nothing in it can run code when loaded: tensors are safetensors, everything else is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from megatron.checkpoint.storage import (
    discard_older,
    folder_of,
    iterations,
    newest_iteration,
    replace_text,
    write_checkpoint,
)
from megatron.flags import LARGEST, Config, InputError, flag_name
from megatron.model.config import ModelConfig
from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer

C = TypeVar("C", bound=Config)

FORMAT = "megatron-checkpoint"
VERSION = 1

# Fields of ModelConfig that may differ between a checkpoint and the run that loads it.
FREE = {
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "init_method_xavier_uniform",
    "mask_padded_vocab",
    "max_position_embeddings",  # free without a table of positions; with one its rows are compared
}
# Tables with a row for every id; how many rows of padding follow is not part of the model.
VOCABULARY_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint found on disk, its state read, its tensors not yet."""

    folder: Path
    state: dict[str, Any]

    @property
    def iteration(self) -> int:
        return self.state["iteration"]


def find_checkpoint(load: str, save: str | None) -> Checkpoint | None:
    """The newest checkpoint of the folder `load`; None if it may be empty, being that of `save`, and is.

    Raises:
        InputError: there is no checkpoint, or it is not whole.
    """
    root = Path(load)
    iteration = newest_iteration(root)
    if iteration is not None:
        folder = folder_of(root, iteration)
        return Checkpoint(folder, read_state(folder))
    if root.is_dir() and iterations(root):
        raise InputError(
            f"--load: {load} holds {folder_of(root, iterations(root)[-1]).name}, but no "
            "latest_checkpointed_iteration.txt to say that it is whole; write the number there to load it"
        )
    if save is not None and root.resolve() == Path(save).resolve():
        return None
    why = (
        "is not a folder"
        if not root.is_dir()
        else "holds no checkpoint (no latest_checkpointed_iteration.txt)"
    )
    raise InputError(f"--load: {load} {why}")


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
    numbers = (int, float, type(None))
    return isinstance(value, list) and all(
        isinstance(row, dict) and all(type(x) in numbers for x in row.values()) for row in value
    )


# What state.json must hold, and how a value is told to be right.
STATE_FIELDS = {
    "task": lambda value: isinstance(value, str),
    "iteration": _is_count,
    "consumed_samples": _is_count,
    "train_samples": _is_count,
    "evaluation_due": lambda value: isinstance(value, bool),
    "bad_steps": _is_count,
    "history": _is_history,
    "vocab_size": _is_count,
    "padded_vocab_size": _is_count,
    "optimizer_steps": lambda value: value is None or _is_count(value),
    "schedule": lambda value: isinstance(value, dict),
    "config": lambda value: isinstance(value, dict) and all(isinstance(v, dict) for v in value.values()),
}


def mark_evaluated(root: Path, iteration: int) -> None:
    """Note in the checkpoint of an iteration that the evaluation which was due when it was saved is done."""
    folder = folder_of(root, iteration)
    state = read_state(folder) | {"evaluation_due": False}
    replace_text(folder / "state.json", json.dumps(state, indent=1, allow_nan=False) + "\n")


def save_checkpoint(
    root: Path,
    state: dict[str, Any],
    *,
    buffer: ParamBuffer,
    optimizer: Optimizer | None,
    tokenizer_files: list[Path],
    keep_last: int | None,
) -> None:
    """Write a checkpoint of `state["iteration"]`, and delete the oldest beyond `keep_last`.

    Args:
        optimizer: None to leave its state out.
    """
    state = {"format": FORMAT, "version": VERSION, "optimizer_steps": None, **state}
    with write_checkpoint(root, state["iteration"]) as folder:
        _save_tensors(folder / "model.safetensors", buffer.named(buffer.params))
        if optimizer is not None:
            state["optimizer_steps"] = optimizer.steps
            _save_tensors(folder / "optimizer.safetensors", _optimizer_tensors(buffer, optimizer))
        if tokenizer_files:
            (folder / "tokenizer").mkdir()
            for file in tokenizer_files:
                shutil.copyfile(file, folder / "tokenizer" / file.name)
        (folder / "state.json").write_text(
            json.dumps(state, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
    if keep_last is not None:
        discard_older(root, state["iteration"], keep_last)


def load_into(checkpoint: Checkpoint, buffer: ParamBuffer, optimizer: Optimizer | None) -> None:
    """Fill weights, and with `optimizer` its state, from a checkpoint.

    Raises:
        InputError: a file is missing or torn, or a tensor is missing, unknown or of another shape.
    """
    tensors = _load_tensors(checkpoint.folder / "model.safetensors")
    _copy_tensors(checkpoint, "model.safetensors", tensors, buffer.named(buffer.master))
    if optimizer is not None:
        if checkpoint.state.get("optimizer_steps") is None:
            raise InputError(
                f"{checkpoint.folder}: was saved without the state of the optimizer (--no-save-optim); "
                "load it with --no-load-optim or --finetune"
            )
        tensors = _load_tensors(checkpoint.folder / "optimizer.safetensors")
        # Where the file has no master weights the model was fp32, and its parameters are the masters.
        wanted = _optimizer_tensors(buffer, optimizer)
        if not any(name.startswith("master/") for name in tensors):
            wanted = {name: t for name, t in wanted.items() if not name.startswith("master/")}
        elif buffer.master is buffer.params:
            wanted |= {f"master/{name}": t for name, t in buffer.named(buffer.master).items()}
        _copy_tensors(checkpoint, "optimizer.safetensors", tensors, wanted)
        optimizer.steps = checkpoint.state["optimizer_steps"]
    buffer.copy_master_to_params()


def _optimizer_tensors(buffer: ParamBuffer, optimizer: Optimizer) -> dict[str, Tensor]:
    flats = dict(optimizer.moments)
    if buffer.master is not buffer.params:
        flats["master"] = buffer.master
    return {f"{kind}/{name}": t for kind, flat in flats.items() for name, t in buffer.named(flat).items()}


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    safetensors.torch.save_file({name: t.detach().cpu() for name, t in tensors.items()}, path)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise InputError(f"{path}: is missing; the checkpoint is not whole") from None
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def _copy_tensors(
    checkpoint: Checkpoint, file: str, source: dict[str, Tensor], target: dict[str, Tensor]
) -> None:
    path = checkpoint.folder / file
    for what, names in (
        ("lacks", target.keys() - source.keys()),
        ("has unknown", source.keys() - target.keys()),
    ):
        if names:
            shown = ", ".join(sorted(names)[:10]) + (", ..." if len(names) > 10 else "")
            raise InputError(f"{path}: {what} {len(names)} tensor(s): {shown}")
    for name, tensor in target.items():
        given = source[name]
        if name.endswith(VOCABULARY_TABLES) and given.dim() == 2:
            rows = max(checkpoint.state["vocab_size"], min(len(given), len(tensor)))
            given, tensor = given[:rows], tensor[:rows]
        if given.shape != tensor.shape:
            raise InputError(
                f"{path}: {name} has shape {tuple(given.shape)}, but the model has {tuple(tensor.shape)}"
            )
        tensor.copy_(given)


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


def check_architecture(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise `InputError` naming the flags in which a run's model differs from the checkpoint's."""
    saved = model_config(checkpoint)
    differing = [
        f"{flag_name(field)} (checkpoint: {getattr(saved, field.name)}, given: {getattr(config, field.name)})"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in FREE and getattr(saved, field.name) != getattr(config, field.name)
    ]
    if differing:
        raise InputError(f"--load: {checkpoint.folder} holds another model: {'; '.join(differing)}")


def load_weights(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    """Fill a model that is not trained further (evaluation, generation) from a checkpoint."""
    tensors = _load_tensors(checkpoint.folder / "model.safetensors")
    with torch.no_grad():
        _copy_tensors(checkpoint, "model.safetensors", tensors, dict(model.named_parameters()))
