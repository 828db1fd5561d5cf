"""Collectives over an axis of the mesh, plain and differentiable; over an axis of size 1 each does nothing.

The differentiable ones are g of arXiv 1909.08053 section 3 and its form along the sequence of arXiv 2205.05198
section 4.2. Their conjugates, which communicate backward, are part of the column-parallel layer (`layers.py`),
where that communication overlaps with work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.flags import LostRank
from megatron.parallel.mesh import ALONE, Axis, rank_names

# torch 2.13 has renamed these, and warns of the old names at every use.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def named(what: str, axis: Axis) -> Iterator[None]:
    """Note which communication this process is in, and say of one that failed which it was and among whom.

    One that failed stays noted: it is where this process stands.

    Raises:
        LostRank: it failed.
    """
    axis.activity.communication = (what, axis)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise  # of work before it, which only shows here
        rank = dist.get_rank()
        others = [other for other in axis.ranks if other != rank]
        who = f"rank {others[0]}" if len(others) == 1 else "one of them"
        raise LostRank(
            f"rank {rank} waited in {what} over the {axis.name} axis for {rank_names(others)}; {who} is gone, or did "
            f"not come within --distributed-timeout-minutes: {str(error).splitlines()[0][:200]}"
        ) from error
    axis.activity.communication = None
    axis.activity.steps += 1


@dataclasses.dataclass
class Pending:
    """A communication that has been started. `wait` gives its result."""

    result: Tensor
    work: dist.Work | None = None
    what: str = ""
    axis: Axis = ALONE

    def done(self) -> bool:
        """Whether it has ended; an error shows when it is waited for."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> Tensor:
        if self.work is not None:
            with named(self.what, self.axis):
                self.work.wait()
            self.work = None
        return self.result


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Begin to replace `x`, any shape, by its sum over the processes of `axis`, in place."""
    if axis.size == 1:
        return Pending(x)
    with named("all-reduce", axis):
        return Pending(x, dist.all_reduce(x, group=axis.group, async_op=True), "all-reduce", axis)


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Begin to join `x` [n, ...] of all processes of `axis`, in order: [n · size, ...]. `out` may contain `x`."""
    if axis.size == 1:
        return Pending(x)
    if out is None:
        out = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
    with named("all-gather", axis):
        work = _gather(out, x.contiguous(), group=axis.group, async_op=True)
    return Pending(out, work, "all-gather", axis)


def start_reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Begin to sum `x` [n · size, ...] over `axis` and give this process its part [n, ...].

    `out` may be that part of `x` itself.
    """
    if axis.size == 1:
        return Pending(x)
    if out is None:
        out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    with named("reduce-scatter", axis):
        work = _reduce_scatter(out, x.contiguous(), group=axis.group, async_op=True)
    return Pending(out, work, "reduce-scatter", axis)


def all_reduce_sum(x: Tensor, axis: Axis) -> Tensor:
    """Replace `x`, any shape, by its sum over the processes of `axis`, in place."""
    return start_all_reduce(x, axis).wait()


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """Replace `x`, any shape, by its maximum over the processes of `axis`, in place."""
    if axis.size > 1:
        with named("all-reduce", axis):
            dist.all_reduce(x, dist.ReduceOp.MAX, group=axis.group)
    return x


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Join `x` [n, ...] of all processes of `axis`, in order: [n · size, ...]."""
    return start_all_gather(x, axis).wait()


def broadcast(x: Tensor, axis: Axis) -> Tensor:
    """Replace `x`, any shape, by that of the first process of `axis`, in place."""
    if axis.size > 1:
        with named("broadcast", axis):
            dist.broadcast(x, axis.ranks[0], group=axis.group)
    return x


def all_equal(value: int, axis: Axis) -> bool:
    """Whether the processes of `axis` came with the same value, of less than 63 bits."""
    largest, smallest = all_reduce_max(torch.tensor([value, -value]), axis).tolist()
    return largest == -smallest


def gather_texts(text: str, axis: Axis) -> list[str]:
    """A text of each process of `axis`, which holds the whole run, in order."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = all_gather(torch.tensor([len(data)]), axis).tolist()
    padded = torch.zeros(max(lengths) or 1, dtype=torch.uint8)
    padded[: len(data)] = data
    rows = all_gather(padded, axis).view(axis.size, -1)
    return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, lengths, strict=True)]


@contextmanager
def together(axis: Axis, kind: type[Exception] = OSError) -> Iterator[None]:
    """A block that every process of `axis` runs, and that an exception of a kind ends on all if it ends it on one."""
    failure: Exception | None = None
    try:
        yield
    except kind as error:
        failure = error
    failed = int(all_reduce_max(torch.tensor([0 if failure is None else axis.rank + 1]), axis))
    if failure is not None:
        raise failure
    if failed:
        raise kind(f"rank {axis.ranks[failed - 1]} could not do its part, and says why")


def share(x: Tensor, axis: Axis) -> Tensor:
    """This process's part of `x` [n · size, ...] that all of `axis` hold: [n, ...]."""
    return x if axis.size == 1 else x.chunk(axis.size)[axis.rank].contiguous()


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce_sum(x.contiguous(), axis)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return start_reduce_scatter(x, axis).wait()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.axis), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return share(grad, ctx.axis), None


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """g of the paper: the sum of `x` over `axis`; backward passes the gradient on."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def reduce_scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[s, ...] of each to [s / size, ...] of their sum; backward gathers the gradient along the sequence."""
    return x if axis.size == 1 else _ReduceScatterSequence.apply(x, axis)


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[s, ...] of each to [s · size, ...], for work that all processes then do alike; backward each keeps its part."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)
