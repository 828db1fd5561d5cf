"""Elementwise functions of tensors as one kernel forward and one backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.ops.compiler import CompileFn


def fused(run: CompileFn, function: Callable[..., Tensor], x: Tensor, *constants: Tensor) -> Tensor:
    """function(x, *constants) by two functions that `run` calls: itself, and its gradient with respect to x.

    Saves only the inputs; backward recomputes what lies between. The function must be the same object at every call,
    since it is compiled once.
    """
    return _Fused.apply(x, run, function, *constants)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, run: CompileFn, function: Callable[..., Tensor], *constants: Tensor
    ) -> Tensor:
        ctx.run, ctx.function = run, function
        ctx.save_for_backward(x, *constants)
        return run(function, x, *constants)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = ctx.run(_gradient(ctx.function), grad, *ctx.saved_tensors)
        return grad_x, *[None] * (len(ctx.saved_tensors) + 1)


@functools.cache
def _gradient(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The gradient with respect to x as a function of (grad, x, *constants)."""

    def backward(grad: Tensor, x: Tensor, *constants: Tensor) -> Tensor:
        vjp = torch.func.vjp(lambda y: function(y, *constants), x)[1]
        return vjp(grad)[0]

    backward.__name__ = f"{function.__name__}_backward"
    return backward
