"""Exchange of heads for positions before attention, and back after it (arXiv 2309.14509).

Backward needs the output of attention twice: in attention itself, and after the exchange in the layer that reads it.
Attention takes it only for the product of the output and its gradient, one number of each query and head (arXiv
2307.08691 section 3.1). So memory holds the exchanged output alone, the product comes with the gradient, and attention
gets another output with the same product.

Shapes in names: b batch, n heads, s positions of a rank, d width of a head, w width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.data.zigzag import Zigzag
from megatron.ops.compiler import CompileFn
from megatron.parallel.collectives import Exchange, start_all_to_all
from megatron.parallel.mesh import Axis


def attend_by_heads(
    attend: Callable[..., Tensor], *tensors_bnsd: Tensor, heads: Axis, zigzag: Zigzag, run: CompileFn
) -> Tensor:
    """Return attend(*tensors), [b, n, s, w], where each rank computes some of the heads at all positions.

    Args:
        attend: gets n / H of the heads at H · s positions and returns [b, n / H, H · s, w]. When its backward reads the
            output, it gets other values, whose product with the gradient is the same for each query and head.
        heads: the H ranks.
        zigzag: division of the positions among them.
        run: calls a function of tensors, compiled or not.
    """
    saved = _Saved()
    tensors = to_positions(*tensors_bnsd, heads=heads, zigzag=zigzag)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        out = attend(*tensors)
    return _ToHeads.apply(out, saved, heads, zigzag, run)


def to_positions(*tensors_bnsd: Tensor, heads: Axis, zigzag: Zigzag) -> tuple[Tensor, ...]:
    """Exchange each [b, n, s, d] for [b, n / H, H · s, d], by one all-to-all."""
    size, (b, _, s, _) = heads.size, tensors_bnsd[0].shape
    # By the rank that the heads go to.
    rows = [x.unflatten(1, (size, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1) for x in tensors_bnsd]
    received = Exchange(torch.cat(rows, 1), heads, [s] * size, [s] * size).wait()
    columns = received.split([row.shape[1] for row in rows], 1)
    return tuple(
        zigzag.restore(x.unflatten(0, (size, s)))
        .unflatten(1, (b, y.shape[1] // size, y.shape[3]))
        .permute(1, 2, 0, 3)
        for x, y in zip(columns, tensors_bnsd, strict=True)
    )


def to_heads(out_bnsw: Tensor, heads: Axis, zigzag: Zigzag) -> Tensor:
    """Exchange [b, n / H, H · s, w] for [b, n, s, w], by one all-to-all."""
    size, (b, n, positions, w) = heads.size, out_bnsw.shape
    s = positions // size
    chunks = out_bnsw.permute(2, 0, 1, 3).flatten(1).unflatten(0, (zigzag.segments, 2, size, -1))
    first, second = chunks.transpose(0, 2).unbind(1)  # each [H, segments, chunk, ...]
    rows = torch.stack((first, second.flip(0)), 2).flatten(0, 3)
    received = start_all_to_all(rows, heads, [s] * size, [s] * size).wait()
    # Heads come last in memory, as the next layer reads them.
    out_sbnw = received.view(size, s, b, n, w).permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()
    return out_sbnw.permute(1, 2, 0, 3)


class _Saved:
    """The tensors that attention saves for backward. `_ToHeads` saves them instead, without the output.

    Attributes:
        tensors: in the order of saving.
        others: indices of those that are not views of the output.
        views: arguments of `as_strided` of those that are.
        out, elements: those of the output, and the number of elements of its memory.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.others: list[int] = []
        self.views: dict[int, tuple[Any, ...]] = {}
        self.out: tuple[Any, ...] = ()
        self.elements = 0

    def pack(self, x: Tensor) -> int:
        self.tensors[len(self.tensors)] = x
        return len(self.tensors) - 1

    def unpack(self, index: int) -> Tensor:
        return self.tensors.pop(index)  # attention alone holds it from now on

    def take(self, out: Tensor) -> list[Tensor]:
        """Give up the tensors, and return those that are not views of the output."""
        self.out, self.elements = _view(out), out.untyped_storage().nbytes() // out.element_size()
        storage = out.untyped_storage()._cdata
        self.views = {i: _view(x) for i, x in self.tensors.items() if x.untyped_storage()._cdata == storage}
        others = {i: x for i, x in self.tensors.items() if i not in self.views}
        self.others, self.tensors = list(others), {}
        return list(others.values())

    def give_back(self, others: list[Tensor], out: Tensor) -> None:
        """Return what `take` returned, with values for the output, to attention's backward."""
        self.tensors = dict(zip(self.others, others, strict=True))
        if self.views:
            memory = out.new_zeros(self.elements)
            memory.as_strided(*self.out).copy_(out)
            self.tensors |= {i: memory.as_strided(*view) for i, view in self.views.items()}


def _view(x: Tensor) -> tuple[Any, ...]:
    """The arguments of `as_strided`."""
    return x.size(), x.stride(), x.storage_offset()


class _ToHeads(torch.autograd.Function):
    """`to_heads`, which saves its result, and what attention has saved."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, saved: _Saved, heads: Axis, zigzag: Zigzag, run: CompileFn) -> Tensor:
        ctx.saved, ctx.heads, ctx.zigzag, ctx.run = saved, heads, zigzag, run
        result = to_heads(out, heads, zigzag)
        ctx.save_for_backward(result, *saved.take(out))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, *others = ctx.saved_tensors
        product_bns = ctx.run(product, grad, out)
        # Its bytes are further channels of the gradient.
        tensors = grad, product_bns.unsqueeze(-1).view(grad.dtype)
        grad, received = to_positions(*tensors, heads=ctx.heads, zigzag=ctx.zigzag)
        ctx.saved.give_back(others, with_product(grad, received.view(product_bns.dtype), ctx.run))
        return grad, None, None, None, None


def product(grad_bnsw: Tensor, out_bnsw: Tensor) -> Tensor:
    """The product of the two, summed over w, [b, n, s] in fp32 (fp64 of fp64)."""
    return (grad_bnsw.to(torch.promote_types(grad_bnsw.dtype, torch.float32)) * out_bnsw).sum(-1)


def with_product(grad_bnsw: Tensor, product_bns1: Tensor, run: CompileFn) -> Tensor:
    """Return a tensor like `grad_bnsw` whose `product` with it has the given values.

    A bf16 number has 8 significant bits. So the factor of the gradient's largest element gives the product to 8 bits,
    and the factors of the other elements correct its rounding error: the sum is exact to 16 bits.
    """
    # Two functions, since compiled code would not round within one.
    return run(_with_rest, grad_bnsw, product_bns1, *run(_first_factor, grad_bnsw, product_bns1))


def _first_factor(grad_bnsw: Tensor, product_bns1: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the largest element of the gradient, and the factor that gives the product, each [b, n, s, 1]."""
    index_bns1 = grad_bnsw.abs().argmax(-1, keepdim=True)
    largest = grad_bnsw.gather(-1, index_bns1).to(product_bns1.dtype)
    factor = torch.where(largest == 0, 0.0, product_bns1 / largest)
    return index_bns1, factor.to(grad_bnsw.dtype)


def _with_rest(grad_bnsw: Tensor, product_bns1: Tensor, index_bns1: Tensor, factor_bns1: Tensor) -> Tensor:
    """The factors of all elements: the given one of the largest; those of the others correct its rounding error."""
    grad = grad_bnsw.to(product_bns1.dtype)
    largest = grad.gather(-1, index_bns1)
    is_largest = torch.arange(grad.shape[-1], device=grad.device) == index_bns1
    others = torch.where(is_largest, 0.0, grad)
    # The lower bound limits the factors where all other elements are much smaller than the largest.
    square = torch.maximum(others.square().sum(-1, keepdim=True), (largest / 256).square())
    rest = (product_bns1 - factor_bns1 * largest) / square.clamp(min=torch.finfo(square.dtype).tiny)
    return torch.where(is_largest, factor_bns1, (others * rest).to(grad_bnsw.dtype))
