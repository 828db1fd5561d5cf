"""Which code computes each hot operation, chosen once when a run starts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.flags import InputError
from megatron.ops.activation import compiled_gelu, compiled_swiglu, gelu, swiglu
from megatron.ops.attention import attention, attention_by_blocks
from megatron.ops.compiler import Compiler, Run, as_written
from megatron.ops.config import OpsConfig
from megatron.ops.linear import (
    AddProduct,
    Matmul,
    add_product,
    add_product_in_one,
    has_add_product_in_one,
    has_onednn,
    matmul,
    onednn_add_product,
    onednn_matmul,
)
from megatron.ops.norm import (
    apex_layer_norm,
    apex_rms_norm,
    compiled_layer_norm,
    compiled_rms_norm,
    has_apex,
    layer_norm,
    rms_norm,
    te_fault,
    te_layer_norm,
    te_rms_norm,
)
from megatron.ops.projected_loss import AT_ONCE, projected_loss
from megatron.ops.rotary import compiled_rotate, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ops:
    """The operations; by default plain PyTorch.

    Attributes:
        projected_loss: of the output layer; None computes all logits, and the loss of them.
        kinds: what was chosen, the same on every process.
        notes: the same for people, and why, a line each.
    """

    matmul: Matmul = matmul
    add_product: AddProduct = add_product
    attention: Callable[..., Tensor] = attention
    gelu: Callable[..., Tensor] = gelu
    swiglu: Callable[[Tensor], Tensor] = swiglu
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = layer_norm
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    projected_loss: Callable[..., Tensor] | None = None
    kinds: tuple[str, ...] = ("plain",)
    notes: tuple[str, ...] = ("operations: plain PyTorch",)


PLAIN = Ops()

# LayerNorm and RMSNorm by whose they are.
NORMS = {
    "torch": (layer_norm, rms_norm),
    "apex": (apex_layer_norm, apex_rms_norm),
    "Transformer Engine": (te_layer_norm, te_rms_norm),
}

# Floating-point operations of a microbatch, on a CPU, from which on compiling saves more time in minutes than it takes.
WORTHWHILE = 5e9


def find_compiler(device: torch.device) -> tuple[Compiler | None, str]:
    """What compiles for a device here, and where it is kept; or None, and why nothing can be compiled."""
    try:
        compiler = Compiler()
        fault = compiler.check(device)
    except OSError as error:
        fault = str(error)
    if fault is not None:
        return None, fault
    return compiler, f"the others compiled when first needed, and kept in {compiler.folder}"


def choose_ops(
    config: OpsConfig,
    *,
    work: float,
    dtype: torch.dtype,
    device: torch.device,
    find: Callable[[torch.device], tuple[Run | None, str]] = find_compiler,
    adds: Callable[[torch.dtype, torch.device], bool] = has_add_product_in_one,
) -> Ops:
    """The operations of a run.

    Args:
        work: floating-point operations of a microbatch on one process.
        find: finds a compiler, as `find_compiler` does by trying it on the device.
        adds: tells what `has_add_product_in_one` does by trying it there.

    Raises:
        InputError: what the flags ask for cannot be had here.
    """
    if config.ops_backend == "plain":
        return PLAIN
    norms = _choose_norms(config.ops_backend, device)
    compiler, note = _compiler(config, work, device, find)
    run: Run = compiler or as_written
    product, adding, library = matmul, add_product, "torch"
    if device.type == "cpu" and has_onednn(dtype):
        product, adding, library = onednn_matmul, onednn_add_product, "oneDNN"
    elif adds(dtype, device):
        adding = add_product_in_one
    normalise, normalise_rms = NORMS[norms]
    if compiler is not None and device.type == "cpu":
        norms = "compiled code"
        normalise, normalise_rms = (
            functools.partial(f, run) for f in (compiled_layer_norm, compiled_rms_norm)
        )
    in_one = adding is add_product_in_one or (dtype == torch.float32 and adding is add_product)
    sums = f"gradients of weights added {'within' if in_one else 'after'} them"
    ops = Ops(
        matmul=product,
        add_product=adding,
        layer_norm=normalise,
        rms_norm=normalise_rms,
        projected_loss=functools.partial(projected_loss, run, product, adding, AT_ONCE[device.type]),
        kinds=(library, norms, sums, "compiled" if compiler else "as written"),
        notes=(
            f"operations: products by {library}, {sums}, norms by {norms}, logits a part at a time; {note}",
        ),
    )
    if compiler is None:
        return ops
    return dataclasses.replace(
        ops,
        attention=functools.partial(attention_by_blocks, run) if product is onednn_matmul else attention,
        gelu=functools.partial(compiled_gelu, run),
        swiglu=functools.partial(compiled_swiglu, run),
        rotate=functools.partial(compiled_rotate, run),
    )


def _choose_norms(backend: str, device: torch.device) -> str:
    """Whose normalisations a back end has on a device. Transformer Engine's have to be asked for: nothing is known of
    them that were better, and importing it takes seconds."""
    if backend in ("apex", "transformer-engine") and device.type != "cuda":
        name = "apex" if backend == "apex" else "Transformer Engine"
        raise InputError(f"--ops-backend {backend}: {name} needs a GPU; use --ops-backend auto")
    if backend == "transformer-engine":
        fault = te_fault()
        if fault is not None:
            raise InputError(
                f"--ops-backend transformer-engine: Transformer Engine cannot be used here: {fault}; "
                "pip install --no-build-isolation 'transformer_engine[pytorch]', or use --ops-backend auto"
            )
        return "Transformer Engine"
    found = device.type == "cuda" and backend in ("auto", "apex") and has_apex()
    if backend == "apex" and not found:
        raise InputError(
            "--ops-backend apex: this Python has no apex with its CUDA extensions, which is not on PyPI: install it "
            "as https://github.com/NVIDIA/apex says, or use --ops-backend auto"
        )
    return "apex" if found else "torch"


def _compiler(
    config: OpsConfig, work: float, device: torch.device, find: Callable[..., tuple[Run | None, str]]
) -> tuple[Run | None, str]:
    """What compiles, if anything, and a remark on it."""
    if not config.torch_compile:
        return None, "nothing compiled (--no-torch-compile)"
    if config.ops_backend == "auto" and device.type == "cpu" and work < WORTHWHILE:
        return None, "nothing compiled, for the model is small (--ops-backend compile does all the same)"
    compiler, note = find(device)
    if compiler is not None:
        return compiler, note
    if config.ops_backend == "compile":
        raise InputError(
            f"--ops-backend compile: torch.compile does not work here: {note}; use --ops-backend plain"
        )
    return None, f"nothing compiled, for torch.compile does not work here: {note}"
