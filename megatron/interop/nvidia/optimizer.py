"""The state of Megatron-LM's optimizer, whose tensors are numbered, by the names of their weights.

The numbers follow the order in which the modules were created: first the weights with weight decay, then the others,
which are biases and the parameters of norms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.errors import InputError
from megatron.interop.nvidia.names import HEAD_COPY
from megatron.interop.torch_file import StoredTensor

# State tensors of the native optimizers.
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
MASTER = "master"


def optimizer_tensors(
    path: Path, optimizer: Any, chunks: list[dict[str, StoredTensor]], iteration: int
) -> tuple[dict[str, list[dict[str, StoredTensor]]], int]:
    """The optimizer state of one rank, and the number of optimizer steps.

    Args:
        optimizer: the entry "optimizer" of the file `path`.
        chunks: the weights of each model chunk, by key.
        iteration: the number of steps for SGD, which saves none.

    Returns:
        For each kind ("exp_avg", ..., "master" for the fp32 weights of a half-precision model), the tensors of each
        chunk by the keys of the weights; and the number of steps.

    Raises:
        InputError: it is not the state of an optimizer of these weights.
    """
    try:
        inner = optimizer.get("optimizer", optimizer)
        order = [key for decays in (True, False) for key in _in_order(chunks, decays)]
        numbers = [number for group in inner["param_groups"] for number in group["params"]]
        if not all(type(number) is int for number in numbers):
            raise TypeError("a parameter's number is not an integer")
        state = inner["state"]
        found = {kind: [state[n][kind] for n in numbers] for kind in MOMENTS if kind in state[numbers[0]]}
        if "fp32_from_fp16_params" in optimizer:
            found[MASTER] = [tensor for group in optimizer["fp32_from_fp16_params"] for tensor in group]
        default = iteration if "momentum_buffer" in found else None
        steps = state[numbers[0]].get("step", inner["param_groups"][0].get("step", default))
        steps = int(steps.read()) if isinstance(steps, StoredTensor) else int(steps)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
        raise InputError(
            f"{path}: its optimizer state is not that of Megatron-LM v2.5's Adam or SGD without the distributed "
            "optimizer; give --no-load-optim to read only the weights"
        ) from None
    by_kind = {}
    for kind, tensors in found.items():
        by_kind[kind] = _by_key(path, kind, order, tensors, chunks)
    return by_kind, steps


def _in_order(chunks: list[dict[str, StoredTensor]], decays: bool) -> list[tuple[int, str]]:
    """The chunk and key of each parameter with weight decay, or of the others, in the optimizer's order."""
    found = []
    for number, chunk in enumerate(chunks):
        # The copy of the word embeddings is created with the stack, before the heads of BERT.
        keys = sorted(chunk, key=lambda key: (not key.startswith("language_model."), key != HEAD_COPY))
        for key in keys:
            if decays == (key.endswith(".weight") and "layernorm" not in key):
                found.append((number, key))
    return found


def _by_key(
    path: Path,
    kind: str,
    order: list[tuple[int, str]],
    tensors: list[Any],
    chunks: list[dict[str, StoredTensor]],
) -> list[dict[str, StoredTensor]]:
    if len(tensors) != len(order):
        raise InputError(
            f"{path}: its optimizer has {len(tensors)} tensors {kind}, but the model has {len(order)} weights"
        )
    result: list[dict[str, StoredTensor]] = [{} for _ in chunks]
    for (number, key), tensor in zip(order, tensors, strict=True):
        if not isinstance(tensor, StoredTensor) or tensor.shape != chunks[number][key].shape:
            shape = tensor.shape if isinstance(tensor, StoredTensor) else None
            raise InputError(
                f"{path}: {kind} of {key} in its optimizer has shape {shape}, but the weight has "
                f"{chunks[number][key].shape}"
            )
        result[number][key] = tensor
    return result
