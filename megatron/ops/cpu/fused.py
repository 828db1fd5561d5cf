"""Elementwise functions of tensors as one kernel forward and one backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.ops.compiler import CompileFn


def fused(run: CompileFn, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) by two functions that `run` calls: itself, and its gradient.

    Saves only x; backward recomputes what lies between. The function must be the same object at every call, since it is
    compiled once.
    """
    return _Fused.apply(x, run, function)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: CompileFn, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.run, ctx.function = run, function
        ctx.save_for_backward(x)
        return run(function, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.run(_gradient(ctx.function), grad, *ctx.saved_tensors), None, None


@functools.cache
def _gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The gradient of a function of x, as a function of (grad, x)."""

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        vjp = torch.func.vjp(function, x)[1]
        return vjp(grad)[0]

    backward.__name__ = f"{function.__name__}_backward"
    return backward
