"""Loading: every process reads what it holds, whatever the layout that the checkpoint was saved in."""

from __future__ import annotations

from collections.abc import Container

import torch

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.foreign import Assembled
from megatron.checkpoint.pieces import Pieces
from megatron.flags import InputError
from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import all_reduce_max, gather_texts
from megatron.parallel.mesh import Mesh


def load_into(checkpoint: Checkpoint, buffer: ParamBuffer, optimizer: Optimizer | None) -> None:
    """Fill weights, and with `optimizer` its state, from a checkpoint of any layout. Every process must take part.

    Raises:
        InputError: a file is missing or torn, or a tensor is missing, unknown or of another shape.
    """
    weights = checkpoint.pieces("model")
    _check_known(weights, {entry.name for entry in buffer.entries}, buffer.mesh)
    if optimizer is None:
        _read_weights(buffer, weights, "")
        return
    if checkpoint.state["optimizer_steps"] is None or "optimizer" not in checkpoint.kinds:
        raise InputError(
            f"{checkpoint.folder}: was saved without the state of the optimizer (--no-save-optim); "
            "load it with --no-load-optim or --finetune"
        )
    state = checkpoint.pieces("optimizer")
    # Where the files have no master weights the model was fp32, and its parameters are the masters.
    has_master = any(name.startswith("master/") for name in state.index)
    kinds = (*optimizer.moments, "master") if has_master else tuple(optimizer.moments)
    names = {f"{kind}/{entry.name}" for kind in kinds for entry in buffer.entries}
    _check_known(state, names, buffer.mesh)
    _read_weights(buffer, *((state, "master/") if has_master else (weights, "")))
    for kind, owned in optimizer.moments.items():
        for entry, part, begin in buffer.parts(owned):
            state.read_into(part, f"{kind}/{entry.name}", entry.place, begin)
    optimizer.steps = checkpoint.state["optimizer_steps"]


def load_shared(
    checkpoint: Checkpoint, buffer: ParamBuffer, *, dropped: tuple[str, ...], new: tuple[str, ...]
) -> tuple[str, str]:
    """Fill those weights that a checkpoint of a related model has, and leave the others. Every process must take part.

    Args:
        dropped: beginnings of the names of tensors that the model need not have.
        new: of those that the checkpoint need not have.

    Returns:
        Of which modules there were such, in words.

    Raises:
        InputError: as of `load_into`, for all other tensors.
    """
    weights = checkpoint.pieces("model")
    here = {entry.name for entry in buffer.entries}
    over = {name for name in weights.index if name.startswith(dropped)}
    left = {name for name in here if name.startswith(new) and name not in weights.index}
    _check_known(weights, here | over, buffer.mesh)
    _read_weights(buffer, weights, "", left)
    begun = {name for text in gather_texts(" ".join(left), buffer.mesh.world) for name in text.split()}
    return _in_words(over), _in_words(begun)


def _in_words(names: set[str]) -> str:
    """Modules of which these are weights."""
    return ", ".join(sorted({name.rpartition(".")[0] for name in names})) or "none"


def _read_weights(
    buffer: ParamBuffer, source: Pieces | Assembled, prefix: str, left: Container[str] = ()
) -> None:
    """Fill parameters and master weights from the tensors whose names begin with `prefix`, but for those `left`."""
    parts = () if buffer.is_fp32 else buffer.parts(buffer.masters)
    masters = {entry.name: (part, begin) for entry, part, begin in parts}
    for entry in buffer.entries:
        if entry.name in left:
            continue
        values = source.read(prefix + entry.name, entry.place)
        entry.view(buffer.params).copy_(values)
        if entry.name in masters:
            part, begin = masters[entry.name]
            part.copy_(values.view(-1)[begin : begin + part.numel()])


def _check_known(pieces: Pieces | Assembled, wanted: set[str], mesh: Mesh) -> None:
    """Make sure that the files hold no tensor that no stage of the model has."""
    names = sorted(pieces.index)
    here = torch.tensor([name in wanted for name in names], dtype=torch.int32, device=mesh.device)
    known = all_reduce_max(here, mesh.pp)
    unknown = [name for name, yes in zip(names, known.tolist(), strict=True) if not yes]
    if unknown:
        shown = ", ".join(unknown[:10]) + (", ..." if len(unknown) > 10 else "")
        raise InputError(f"{pieces.folder}: has {len(unknown)} tensor(s) that the model has not: {shown}")


def load_weights(checkpoint: Checkpoint, model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give a model that is not trained further (evaluation, generation) the weights of a checkpoint.

    It may be a part of the model, and on the meta device. Its weights are then on the CPU, in `dtype`.
    """
    weights = checkpoint.pieces("model")
    values = {name: weights.read(p.tied or name, p.place).to(dtype) for name, p in model.named_parameters()}
    model.load_state_dict(values, assign=True)
