"""Loading: every process reads what it holds, whatever the layout that the checkpoint was saved in."""

from __future__ import annotations

import torch

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.foreign import Assembled
from megatron.checkpoint.pieces import Pieces
from megatron.flags import InputError
from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import all_reduce_max
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


def _read_weights(buffer: ParamBuffer, source: Pieces | Assembled, prefix: str) -> None:
    """Fill parameters and master weights from the tensors whose names begin with `prefix`."""
    for entry in buffer.entries:
        entry.view(buffer.params).copy_(source.read(prefix + entry.name, entry.place))
    if not buffer.is_fp32:
        for entry, part, begin in buffer.parts(buffer.masters):
            source.read_into(part, prefix + entry.name, entry.place, begin)


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

    It may be on the meta device. Its weights are then on the CPU, in `dtype`.
    """
    weights = checkpoint.pieces("model")
    values = {name: weights.read(name, p.place).to(dtype) for name, p in model.named_parameters()}
    model.load_state_dict(values, assign=True)
