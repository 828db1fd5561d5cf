"""Optimizer state of current Megatron-LM in "model space": a tensor for each weight and kind of state.

    optimizer.state.exp_avg.NAME       a moment; NAME is that of the weight in the same checkpoint
    optimizer.state.fp32_param.NAME    the fp32 weight

A state tensor has the shape of its weight ("fully_reshardable", and without the distributed optimizer). Until core 0.15
the distributed optimizer flattened each shard of it ("fully_sharded_model_space"): a weight of shape [X, Y] in shards
of shape [x, y] has state of shape [X/x, Y/y, x*y]. Other formats hold the flat buffers of the ranks that wrote them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.errors import InputError
from megatron.interop.external import ExternalTensor, ExternalTensors, list_names
from megatron.interop.nvidia.chunks import OTHER, LayerTensor, kind_of
from megatron.interop.nvidia.experts import EXPERT_BIAS, ExpertTensor
from megatron.interop.nvidia.optimizer import MASTER, MOMENTS
from megatron.interop.nvidia.run import check_value
from megatron.interop.torch_file import StoredTensor
from megatron.interop.unpickle import shown_value

# The native kinds of state tensors, by Megatron-LM's.
KINDS = {kind: kind for kind in MOMENTS} | {"fp32_param": MASTER}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ONLY_WEIGHTS = "give --no-load-optim to read only the weights"


def check_model_space(path: Path, content: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise `InputError` if the checkpoint has optimizer state that is not in model space.

    Args:
        path: the file of `content`, the state that all ranks share; for messages.
        names: all tensors and objects of the checkpoint.
    """
    if all(kind_of(name)[0] != OTHER for name in names):
        return
    metadata, optimizer = content.get("content_metadata"), content.get("optimizer")
    found = metadata.get("distrib_optim_sharding_type") if isinstance(metadata, dict) else None
    if found is None and isinstance(optimizer, dict):
        found = optimizer.get("param_state_sharding_type")
    kind = "an unnamed format" if found is None else f"the format {shown_value(found)}"
    raise InputError(
        f"{path}: its optimizer state is in {kind}, which depends on the ranks that wrote it; save it again in "
        f"Megatron-LM with --dist-ckpt-optim-fully-reshardable, or {ONLY_WEIGHTS}"
    )


def open_states(
    folder: Path,
    states: Mapping[str, Mapping[str, LayerTensor | ExpertTensor]],
    weights: Mapping[str, ExternalTensor],
) -> ExternalTensors:
    """The optimizer state, as the native format names it.

    Args:
        states: the state tensors of each of Megatron-LM's kinds, by native name of their weights.
        weights: by native name.

    Raises:
        InputError: a kind is unknown, or its tensors are not those of the weights.
    """
    unknown = states.keys() - KINDS.keys()
    if unknown:
        raise InputError(
            f"{folder}: its optimizer state has unknown tensors: {list_names(unknown)}; supported are those of Adam "
            f"and SGD; {ONLY_WEIGHTS}"
        )
    shapes = {name: weight.shape for name, weight in weights.items() if not name.endswith(EXPERT_BIAS)}
    sources = _states_of_biases(weights, states.keys())
    for kind, tensors in states.items():
        differing = shapes.keys() ^ tensors.keys()
        if differing:
            raise InputError(
                f"{folder}: its optimizer state {kind} and its weights are not of the same tensors: "
                f"{list_names(differing)}; {ONLY_WEIGHTS}"
            )
        for name, tensor in tensors.items():
            shape = shapes[name]
            if tensor.dtype not in DTYPES or not (
                tensor.shape == shape or _is_flattened(tensor.shape, shape)
            ):
                raise InputError(
                    f"{folder}: {kind} of {name} has shape {tensor.shape} and dtype {str(tensor.dtype)[6:]}, but the "
                    f"weight has shape {shape}; {ONLY_WEIGHTS}"
                )
            dtype = torch.bfloat16 if tensor.dtype == torch.bfloat16 else torch.float32
            parts = tensor.parts if tensor.shape == shape else (functools.partial(_joined, tensor, shape),)
            sources[f"{KINDS[kind]}/{name}"] = ExternalTensor(shape, dtype, parts)
    return ExternalTensors(folder, sources)


def _states_of_biases(
    weights: Mapping[str, ExternalTensor], kinds: Collection[str]
) -> dict[str, ExternalTensor]:
    """The state of the experts' biases, which are no parameters of an optimizer there: the load, overwritten in the
    first step, and the fp32 values of a half-precision model."""
    found = {}
    for name, weight in weights.items():
        if name.endswith(EXPERT_BIAS):
            zeros = functools.partial(torch.zeros, weight.shape)
            found[f"load/{name}"] = ExternalTensor(weight.shape, torch.float32, (zeros,))
            if "fp32_param" in kinds:
                found[f"{MASTER}/{name}"] = weight
    return found


def _is_flattened(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True for the shape of a tensor of shape `shape` in flattened shards."""
    *grid, elements = stored or (0,)
    if len(grid) != len(shape) or any(parts == 0 or n % parts for n, parts in zip(shape, grid, strict=True)):
        return False
    return elements * math.prod(grid) == math.prod(shape)


def _joined(tensor: LayerTensor | ExpertTensor, shape: tuple[int, ...]) -> Tensor:
    return join_flattened(tensor.read(), shape)


def join_flattened(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Join the flattened shards of a tensor of shape `shape`: values[i, j] is the shard in row i and column j."""
    grid, dims = values.shape[:-1], len(shape)
    local = [n // parts for n, parts in zip(shape, grid, strict=True)]
    order = [axis for dim in range(dims) for axis in (dim, dims + dim)]
    return values.view(*grid, *local).permute(order).reshape(shape)


def steps_of(path: Path, content: Mapping[str, Any], kinds: Collection[str]) -> int:
    """The number of steps that the optimizer took.

    Args:
        path: the file of `content`, the state that all ranks share.
        kinds: Megatron-LM's kinds of state; SGD saves no steps, so that they are the iterations.

    Raises:
        InputError: the number is missing or impossible.
    """
    optimizer = content.get("optimizer")
    if isinstance(optimizer, dict):
        optimizer = optimizer.get(0, optimizer)  # several optimizers, which took the same steps
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    state, groups = (inner.get(key) if isinstance(inner, dict) else None for key in ("state", "param_groups"))
    found = [state.get("common_step")] if isinstance(state, dict) else []
    found += (
        [group.get("step") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    )
    if "momentum_buffer" in kinds:
        found.append(content.get("iteration"))
    steps = next((steps for steps in found if steps is not None), None)
    if steps is None:
        raise InputError(f"{path}: lacks the number of steps of its optimizer; {ONLY_WEIGHTS}")
    if isinstance(steps, StoredTensor) and steps.shape == ():
        steps = steps.read().item()
    if isinstance(steps, float) and steps.is_integer():
        steps = int(steps)
    check_value(path, "the number of steps of its optimizer", steps, (int,))
    return int(steps)
