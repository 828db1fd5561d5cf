"""What a checkpoint holds, saved and loaded.

    state.json               iteration, position in the data, configuration, schedule, vocabulary
    model.safetensors        every parameter by its global name, in the dtype of the model
    optimizer.safetensors    `master/NAME` (fp32 weights, where the model is not fp32), `exp_avg/NAME`, ...
                             (where several processes share the model: model-00001-of-00004.safetensors, ...)
    tokenizer/               the tokenizer's files, so that the folder can be used on its own

Nothing in it can run code when loaded: tensors are safetensors, everything else is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.checkpoint.pieces import Pieces, file_name, write_pieces
from megatron.checkpoint.storage import (
    begin_checkpoint,
    discard_older,
    finish_checkpoint,
    folder_of,
    iterations,
    newest_iteration,
    replace_text,
    temporary_folder,
)
from megatron.flags import LARGEST, Config, InputError, flag_name
from megatron.model.config import ModelConfig
from megatron.optim.buffer import ParamBuffer
from megatron.optim.layout import Entry
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import all_reduce_max, together
from megatron.parallel.mesh import Mesh
from megatron.parallel.slices import GlobalSlice

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
}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint found on disk, its state read, its tensors not yet."""

    folder: Path
    state: dict[str, Any]

    @property
    def iteration(self) -> int:
        return self.state["iteration"]

    def pieces(self, kind: str) -> Pieces:
        """The tensors of the `kind` "model" or "optimizer"."""
        return Pieces(self.folder, kind, self.state["files"])


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
    "files": lambda value: _is_count(value) and value > 0,
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
    mesh: Mesh,
    buffer: ParamBuffer,
    optimizer: Optimizer | None,
    tokenizer_files: list[Path],
    keep_last: int | None,
) -> None:
    """Write a checkpoint of `state["iteration"]`, and delete the oldest beyond `keep_last`.

    Every process must take part: of each replica's processes those of the first write, each what it holds.

    Args:
        optimizer: None to leave its state out.

    Raises:
        OSError: it cannot be written; raised by all processes if by one.
    """
    iteration, files = state["iteration"], mesh.pp.size * mesh.tp.size
    state = {"format": FORMAT, "version": VERSION, "files": files, "optimizer_steps": None, **state}
    tensors = {"model": _model_tensors(buffer)}
    if optimizer is not None:
        state["optimizer_steps"] = optimizer.steps
        tensors["optimizer"] = _optimizer_tensors(buffer, optimizer)
    folder, number = temporary_folder(root, iteration), mesh.pp.rank * mesh.tp.size + mesh.tp.rank
    try:
        with together(mesh.world):
            if mesh.is_first:
                begin_checkpoint(root, iteration)
        with together(mesh.world):
            if mesh.dp.rank == 0:
                for kind, pieces in tensors.items():
                    write_pieces(folder / file_name(kind, number, files), pieces)
            if mesh.is_first:
                _write_rest(folder, state, tokenizer_files)
        with together(mesh.world):
            if mesh.is_first:
                finish_checkpoint(root, iteration)
    except BaseException:
        if mesh.is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if keep_last is not None and mesh.is_first:
        discard_older(root, iteration, keep_last)


def _write_rest(folder: Path, state: dict[str, Any], tokenizer_files: list[Path]) -> None:
    if tokenizer_files:
        (folder / "tokenizer").mkdir()
        for file in tokenizer_files:
            shutil.copyfile(file, folder / "tokenizer" / file.name)
    (folder / "state.json").write_text(json.dumps(state, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _model_tensors(buffer: ParamBuffer) -> dict[str, tuple[GlobalSlice, Tensor]]:
    buffer.finish_gathers()
    tensors = {}
    for entry in buffer.entries:
        _add_piece(tensors, entry.name, entry, entry.view(buffer.params), buffer)
    return tensors


def _optimizer_tensors(buffer: ParamBuffer, optimizer: Optimizer) -> dict[str, tuple[GlobalSlice, Tensor]]:
    kinds = optimizer.moments if buffer.is_fp32 else {"master": buffer.masters, **optimizer.moments}
    tensors = {}
    for kind, owned in kinds.items():
        for entry, values in buffer.named(owned):
            _add_piece(tensors, f"{kind}/{entry.name}", entry, values, buffer)
    return tensors


def _add_piece(tensors: dict, name: str, entry: Entry, values: Tensor, buffer: ParamBuffer) -> None:
    """Add what this process is to write of a parameter's values: what no other process of its replica does."""
    rows = entry.counted(buffer.mesh.tp)
    if buffer.mesh.dp.rank > 0 or not rows:
        return
    place = entry.place
    if place.dim == 0:
        place, values = place.part(rows), torch.cat([values[begin:end] for begin, end in rows])
    tensors[name] = place, values.detach().cpu()


def load_into(checkpoint: Checkpoint, buffer: ParamBuffer, optimizer: Optimizer | None) -> None:
    """Fill weights, and with `optimizer` its state, from a checkpoint of any layout. Every process must take part.

    Raises:
        InputError: a file is missing or torn, or a tensor is missing, unknown or of another shape.
    """
    weights = checkpoint.pieces("model")
    _check_known(weights, {entry.name for entry in buffer.entries}, buffer.mesh)
    if optimizer is None:
        for entry in buffer.entries:
            buffer.set_weights(entry, weights.read(entry.name, entry.place))
        return
    if checkpoint.state["optimizer_steps"] is None:
        raise InputError(
            f"{checkpoint.folder}: was saved without the state of the optimizer (--no-save-optim); "
            "load it with --no-load-optim or --finetune"
        )
    state = checkpoint.pieces("optimizer")
    # Where the files have no master weights the model was fp32, and its parameters are the masters.
    has_master = any(name.startswith("master/") for name in state.pieces)
    kinds = (*optimizer.moments, "master") if has_master else tuple(optimizer.moments)
    names = {f"{kind}/{entry.name}" for kind in kinds for entry in buffer.entries}
    _check_known(state, names, buffer.mesh)
    for entry in buffer.entries:
        source, name = (state, f"master/{entry.name}") if has_master else (weights, entry.name)
        buffer.set_weights(entry, source.read(name, entry.place))
        for kind, owned in optimizer.moments.items():
            buffer.put(entry, state.read(f"{kind}/{entry.name}", entry.place), owned)
    optimizer.steps = checkpoint.state["optimizer_steps"]


def _check_known(pieces: Pieces, wanted: set[str], mesh: Mesh) -> None:
    """Make sure that the files hold no tensor that no stage of the model has."""
    names = sorted(pieces.pieces)
    here = torch.tensor([name in wanted for name in names], dtype=torch.int32, device=mesh.device)
    known = all_reduce_max(here, mesh.pp)
    unknown = [name for name, yes in zip(names, known.tolist(), strict=True) if not yes]
    if unknown:
        shown = ", ".join(unknown[:10]) + (", ..." if len(unknown) > 10 else "")
        raise InputError(
            f"{pieces.folder / pieces.kind}*.safetensors: has unknown {len(unknown)} tensor(s): {shown}"
        )


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
    # Without a table of positions the model has no longest sequence of its own.
    free = (
        FREE if config.position_embedding_type == "learned_absolute" else FREE | {"max_position_embeddings"}
    )
    differing = [
        f"{flag_name(field)} (checkpoint: {getattr(saved, field.name)}, given: {getattr(config, field.name)})"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in free and getattr(saved, field.name) != getattr(config, field.name)
    ]
    if differing:
        raise InputError(f"--load: {checkpoint.folder} holds another model: {'; '.join(differing)}")


def check_vocabulary(checkpoint: Checkpoint, vocab_size: int) -> None:
    """Raise `InputError` unless the tokenizer has as many ids as the one the checkpoint was trained with."""
    if checkpoint.state["vocab_size"] != vocab_size:
        raise InputError(
            f"--load: {checkpoint.folder} has a vocabulary of {checkpoint.state['vocab_size']} ids, but the "
            f"tokenizer has {vocab_size}; give the tokenizer that the checkpoint was trained with"
        )


def load_weights(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    """Fill a model that is not trained further (evaluation, generation) from a checkpoint."""
    weights = checkpoint.pieces("model")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights.read(name, p.place))
