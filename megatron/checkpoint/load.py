"""Load a checkpoint: each process reads only its own shards, whatever layout the checkpoint was saved in."""

from __future__ import annotations

from collections.abc import Container

import torch

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.pieces import TensorSource
from megatron.errors import InputError
from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import all_reduce_max
from megatron.parallel.mesh import Mesh

# Ends the names of tensors that a run or its checkpoint may lack: the load of the last batch, for global_aux_loss. The
# load/ of an expert bias is another: each step counts it anew.
OPTIONAL = ".router.load"


def load_into(checkpoint: Checkpoint, buffer: ParamBuffer, optimizer: Optimizer | None) -> None:
    """Load the weights and, unless `optimizer` is None, the optimizer's state. Collective.

    Raises:
        InputError: a file is missing or truncated, or a tensor is missing, unknown or of another shape.
    """
    weights = checkpoint.tensors["model"]
    check_known(weights, {param.name for param in buffer.flat_params}, buffer.mesh)
    if optimizer is None:
        read_weights(buffer, weights, "")
        return
    if checkpoint.state["optimizer_steps"] is None or "optimizer" not in checkpoint.tensors:
        raise InputError(
            f"{checkpoint.folder}: has no optimizer state (--no-save-optim); load it with "
            "--no-load-optim or --finetune"
        )
    optimizer.finish()
    state = checkpoint.tensors["optimizer"]
    # A checkpoint of an fp32 model has no separate master weights.
    has_master = any(name.startswith("master/") for name in state.index)
    master = ("master",) if has_master else ()
    names = {
        f"{kind}/{param.name}"
        for bucket in buffer.buckets
        for kind in (*bucket.group.optimizer.state, *master)
        for param in bucket.flat_params
    }
    hint = "; if --optimizer or --freeze changed, --no-load-optim begins with a new optimizer state"
    check_known(state, names, buffer.mesh, hint)
    required = {name for name in names if not (name.endswith(OPTIONAL) or name.startswith("load/"))}
    if lacking := required - state.index.keys():
        raise InputError(f"{state.folder}: lacks the tensor {min(lacking)}{hint}")
    read_weights(buffer, *((state, "master/") if has_master else (weights, "")))
    for kind, shards in optimizer.state.items():
        for param, part, begin in buffer.parts(shards):
            if f"{kind}/{param.name}" in state.index:
                state.read_into(part, f"{kind}/{param.name}", param.shard_spec, begin)
    optimizer.steps = checkpoint.state["optimizer_steps"]


def read_weights(buffer: ParamBuffer, source: TensorSource, prefix: str, kept: Container[str] = ()) -> None:
    """Load parameters and master weights from the tensors `prefix` + name. Parameters in `kept` keep their values."""
    parts = () if buffer.is_fp32 else buffer.parts(buffer.masters)
    masters = {param.name: (part, begin) for param, part, begin in parts}
    for param in buffer.flat_params:
        lacks = param.name.endswith(OPTIONAL) and prefix + param.name not in source.index
        if lacks or param.name in kept:
            continue
        values = source.read(prefix + param.name, param.shard_spec)
        buffer.param_memory.write(param, values)
        if param.name in masters:
            part, begin = masters[param.name]
            part.copy_(values.view(-1)[begin : begin + part.numel()])


def check_known(source: TensorSource, expected: set[str], mesh: Mesh, hint: str = "") -> None:
    """Raise `InputError` if the source has a tensor that no pipeline stage expects. Collective."""
    names = sorted(source.index)
    here = torch.tensor([name in expected for name in names], dtype=torch.int32, device=mesh.device)
    known = all_reduce_max(here, mesh.pp)
    unknown = [
        name for name, yes in zip(names, known.tolist(), strict=True) if not (yes or name.endswith(OPTIONAL))
    ]
    if unknown:
        shown = ", ".join(unknown[:10]) + (", ..." if len(unknown) > 10 else "")
        raise InputError(f"{source.folder}: has {len(unknown)} tensor(s) that the model lacks: {shown}{hint}")
