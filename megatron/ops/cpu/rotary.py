"""Rotary position embedding by one compiled function, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.ops.compiler import CompileFn
from megatron.ops.rotary import apply_rotary_emb


def compiled_rotary_emb(run: CompileFn, x_bnsd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rotary_emb` by a function that `run` calls."""
    return _Rotation.apply(x_bnsd, cos, sin, run)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_bnsd: Tensor, cos: Tensor, sin: Tensor, run: CompileFn) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(cos, sin)
        return run(apply_rotary_emb, x_bnsd, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # The transpose of a rotation is the rotation back.
        cos, sin = ctx.saved_tensors
        return ctx.run(apply_rotary_emb, grad, cos, -sin), None, None, None
