"""The implementation of each hot operation, chosen once when a run starts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.errors import InputError
from megatron.ops.activation import activation
from megatron.ops.attention import MaskSpec, attention, make_mask
from megatron.ops.compiler import CompileFn, Compiler, eager
from megatron.ops.config import LOGITS_CHUNK_BYTES, LOGITS_PIECE_BYTES, OpsConfig
from megatron.ops.linear import (
    AccumulateWgrad,
    Matmul,
    accumulate_wgrad,
    fused_accumulate_wgrad,
    has_fused_accumulate_wgrad,
    matmul,
)
from megatron.ops.linear_cross_entropy import LinearCrossEntropy
from megatron.ops.norm import layer_norm, rms_norm
from megatron.ops.rotary import apply_rotary_emb

logger = logging.getLogger("megatron")

# Floating-point operations of a microbatch on a CPU from which on torch.compile saves more time within minutes than it
# takes.
MIN_COMPILE_FLOPS = 5e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ops:
    """The operations, by default plain PyTorch.

    Attributes:
        dgrad: (output gradient, Wᵀ, None) to the gradient of a linear layer's input; None computes it by `matmul`.
        expert_rows: products of a mixture's experts are fastest with a multiple of so many rows.
        linear_cross_entropy: output layer and loss in one.
        make_mask: makes the mask that `attention` takes; None where it needs none besides `causal`.
        run: calls a differentiable function, such as a transformer layer, compiled as a whole or not.
        communicate: calls a function that communicates; compiled layers call it between two graphs.
        recomputes_attention: false with compiled layers: GPU kernels of attention keep no scores to save.
        accumulating: returns its parameters; compiled code adds their gradients to `main_grad`, all at once.
        device_keys: with compiled layers only, makes keys of dropout that are on the device.
        kinds: implementations in use, as "key: value"; the same on every rank.
        notes: lines for the log.
    """

    matmul: Matmul = matmul
    dgrad: Callable[[Tensor, Tensor, None], Tensor] | None = None
    accumulate_wgrad: AccumulateWgrad = accumulate_wgrad
    attention: Callable[..., Tensor] = attention
    make_mask: Callable[[MaskSpec], Any] = make_mask
    activation: Callable[[Tensor, str], Tensor] = activation
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = layer_norm
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    apply_rotary_emb: Callable[[Tensor, Tensor, Tensor], Tensor] = apply_rotary_emb
    expert_rows: int = 1
    linear_cross_entropy: LinearCrossEntropy = dataclasses.field(default_factory=LinearCrossEntropy)
    run: CompileFn = eager
    communicate: CompileFn = eager
    recomputes_attention: bool = True
    accumulating: Callable[..., tuple[Tensor, ...]] = lambda *ps: ps
    device_keys: Callable[..., Any] | None = None
    kinds: tuple[str, ...] = ("plain PyTorch",)
    notes: tuple[str, ...] = ("ops: plain PyTorch",)


PLAIN = Ops()

# Makes the fields with which whole layers are compiled. Filled by `megatron.plugins`.
LAYER_OPS: list[Callable[..., dict[str, Any]]] = []
# Gives a compiler for a device, or None and the reason.
FindCompiler = Callable[[torch.device], tuple[CompileFn | None, str]]


def find_compiler(device: torch.device, *, one_graph: bool = True) -> tuple[Compiler | None, str]:
    """Try torch.compile on `device`. Returns the compiler and its cache folder, or None and the error."""
    try:
        # A GPU kernel loads 16 bytes at once only if it knows that they divide the sizes.
        compiler = Compiler(dynamic=True if device.type == "cpu" else None, one_graph=one_graph)
        error = compiler.check(device)
    except OSError as os_error:
        error = str(os_error)
    return (compiler, f"cache in {compiler.folder}") if error is None else (None, error)


def choose_ops(
    config: OpsConfig,
    *,
    work: float,
    dtype: torch.dtype,
    device: torch.device,
    find: FindCompiler = find_compiler,
    has_fused_wgrad: Callable[[torch.dtype, torch.device], bool] = has_fused_accumulate_wgrad,
) -> Ops:
    """Choose the operations of a run.

    Args:
        work: floating-point operations of a microbatch on one rank.
        find: finds a compiler; a dry run has its own.
        has_fused_wgrad: tells if the device has `fused_accumulate_wgrad`.

    Raises:
        InputError: the device does not support what the flags ask for.
    """
    if config.ops_backend == "plain":
        return PLAIN
    fields: dict[str, Any] = {}
    names = {"matmul": "torch", "wgrad": "unfused", "norm": "torch", "loss": "chunked"}
    if dtype == torch.float32:
        names["wgrad"] = "fused"
    if config.ops_backend == "apex":
        from megatron.ops.apex import apex_ops

        fields |= apex_ops(device)
        names["norm"] = "apex"
    compiler, note = _compiler(config, work, device, find)
    layers = config.ops_backend == "layers" or (device.type == "cuda" and config.ops_backend != "apex")
    if compiler is not None and layers:
        fields |= LAYER_OPS[0](compiler, device)
        names |= {"layer": "compiled", "norm": "compiled"}
    elif device.type == "cpu":
        from megatron.ops.cpu.choose import cpu_ops  # a run on GPUs never imports it

        cpu_fields, cpu_names = cpu_ops(dtype, compiler)
        fields, names = fields | cpu_fields, names | cpu_names
    if has_fused_wgrad(dtype, device):
        fields["accumulate_wgrad"] = fused_accumulate_wgrad
        names["wgrad"] = "fused"
    ops = Ops(**fields)
    loss = LinearCrossEntropy(
        chunk_bytes=LOGITS_CHUNK_BYTES[device.type],
        piece_bytes=LOGITS_PIECE_BYTES[device.type],
        run=compiler or eager,
        matmul=ops.matmul,
        accumulate_wgrad=ops.accumulate_wgrad,
    )
    kinds = tuple(f"{key}: {name}" for key, name in names.items())
    return dataclasses.replace(
        ops,
        linear_cross_entropy=loss,
        kinds=(*kinds, f"torch.compile: {'off' if compiler is None else 'on'}"),
        notes=("; ".join(kinds), f"torch.compile: {note}"),
    )


def _compiler(
    config: OpsConfig, work: float, device: torch.device, find: FindCompiler
) -> tuple[CompileFn | None, str]:
    """The compiler, if anything is to be compiled, and the state of torch.compile for the log."""
    if not config.torch_compile:
        return None, "off (--no-torch-compile)"
    if config.ops_backend == "auto" and device.type == "cpu" and work < MIN_COMPILE_FLOPS:
        return None, "skipped, model too small to benefit (--ops-backend compile forces it)"
    compiler, note = find(device)
    if compiler is not None:
        return compiler, f"on, {note}"
    if config.ops_backend in ("compile", "layers"):
        raise InputError(
            f"--ops-backend {config.ops_backend}: torch.compile does not work here: {note}; use --ops-backend plain"
        )
    logger.info("torch.compile: does not work here, so nothing is compiled: %s", note)
    return None, f"does not work here: {note}"
