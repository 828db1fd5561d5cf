"""Operations of a run on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.ops.compiler import CompileFn
from megatron.ops.cpu.activation import compiled_activation
from megatron.ops.cpu.attention import attention_by_blocks, padded_attention
from megatron.ops.cpu.document_attention import (
    attention_by_document,
    attention_with_dropout,
    make_document_mask,
)
from megatron.ops.cpu.linear import (
    EXPERT_ROWS,
    WGRAD_ROWS,
    accumulate_wgrad_by_size,
    has_onednn,
    matmul_by_size,
)
from megatron.ops.cpu.norm import compiled_layer_norm, compiled_rms_norm
from megatron.ops.cpu.rotary import compiled_rotary_emb


def cpu_ops(dtype: torch.dtype, compiler: CompileFn | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields of `Ops` that are different on a CPU, and their names for the log.

    Args:
        compiler: None if nothing is compiled.
    """
    whole: Callable[..., Tensor] = padded_attention
    if compiler is not None and has_onednn(dtype):
        whole = functools.partial(attention_by_blocks, compiler)
    fields: dict[str, Any] = {
        "attention": functools.partial(
            attention_with_dropout, functools.partial(attention_by_document, whole)
        ),
        "make_mask": make_document_mask,
    }
    names: dict[str, str] = {}
    if has_onednn(dtype):
        fields |= {"matmul": matmul_by_size, "accumulate_wgrad": accumulate_wgrad_by_size}
        names["matmul"] = "oneDNN"
        if dtype == torch.float32:
            names["wgrad"] = f"unfused from {WGRAD_ROWS} tokens on"
        else:
            fields["expert_rows"] = EXPERT_ROWS
    if compiler is not None:
        fields["activation"] = functools.partial(compiled_activation, compiler)
        fields["apply_rotary_emb"] = functools.partial(compiled_rotary_emb, compiler)
        fields["layer_norm"] = functools.partial(compiled_layer_norm, compiler)
        fields["rms_norm"] = functools.partial(compiled_rms_norm, compiler)
        names["norm"] = "compiled"
    return fields, names
