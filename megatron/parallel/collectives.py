"""Collectives over an axis of the mesh, plain and differentiable. Over an axis of size 1 they are the identity.

The differentiable ones are g of arXiv 1909.08053 section 3 and its form along the sequence, arXiv 2205.05198 section
4.2. Their conjugates, which communicate in backward, are part of the column-parallel layer (`model/layers.py`), where
that communication overlaps with computation.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.errors import LostRank
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.rendezvous import rank_names

# torch 2.13 renamed these, and warns at every use of the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def named(what: str, axis: Axis) -> Iterator[None]:
    """Record the communication in the heartbeat, and name it and its ranks in errors.

    A communication that fails stays recorded as this rank's status.

    Raises:
        LostRank: the communication failed.
    """
    axis.heartbeat.communication = (what, axis)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise  # an error of an earlier kernel, which is reported here
        rank = dist.get_rank()
        others = [other for other in axis.ranks if other != rank]
        who = f"rank {others[0]}" if len(others) == 1 else "one of them"
        raise LostRank(
            f"rank {rank} waited in {what} over the {axis.name} axis for {rank_names(others)}; {who} is lost or "
            f"exceeded --distributed-timeout-minutes: {str(error).splitlines()[0][:200]}"
        ) from error
    axis.heartbeat.communication = None
    axis.heartbeat.steps += 1


@dataclasses.dataclass
class Pending:
    """A started communication. `wait` returns its result."""

    result: Tensor
    work: dist.Work | None = None
    what: str = ""
    axis: Axis = ALONE
    timeout: datetime.timedelta | None = None  # None for that of the process group

    def done(self) -> bool:
        """True if it has ended, with a result or with an error that `wait` raises."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> Tensor:
        if self.work is not None:
            with named(self.what, self.axis):
                self.work.wait() if self.timeout is None else self.work.wait(self.timeout)
            self.work = None
        return self.result


def _start(what: str, axis: Axis, out: Tensor, call: Callable[..., dist.Work | None], *args: Any) -> Pending:
    """Start a collective that writes `out`."""
    if axis.size == 1:
        return Pending(out)
    with named(what, axis):
        return Pending(out, call(*args, group=axis.group, async_op=True), what, axis)


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Start to replace `x`, any shape, by its sum over `axis`, in place."""
    return _start("all-reduce", axis, x, dist.all_reduce, x)


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Start to concatenate `x` [n, ...] of all ranks of `axis` to [n · size, ...]. `out` may contain `x`."""
    if axis.size == 1:
        return Pending(x)
    out = x.new_empty(x.shape[0] * axis.size, *x.shape[1:]) if out is None else out
    return _start("all-gather", axis, out, _gather, out, x.contiguous())


def start_reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Start to sum `x` [n · size, ...] over `axis` into this rank's part [n, ...]. `out` may be that part of `x`."""
    if axis.size == 1:
        return Pending(x)
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:]) if out is None else out
    return _start("reduce-scatter", axis, out, _reduce_scatter, out, x.contiguous())


def start_all_to_all(x: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Pending:
    """Start to send `sent[r]` rows of `x` to each rank r of `axis`, in order, and to receive `received[r]` of each."""
    out = x.new_empty(sum(received), *x.shape[1:])
    return _start("all-to-all", axis, out, dist.all_to_all_single, out, x.contiguous(), received, sent)


def start_shift(x: Tensor, axis: Axis) -> Pending:
    """Start to send `x`, any shape, to the next rank of `axis`, and to receive that of the rank before."""
    x = x.contiguous()
    out, counts = torch.empty_like(x), [0] * axis.size
    sent, received = (counts[:] for _ in "sr")
    sent[(axis.rank + 1) % axis.size] = received[axis.rank - 1] = len(x)
    return _start("shift", axis, out, dist.all_to_all_single, out, x, received, sent)


def start_reduce(x: Tensor, owner: int, axis: Axis) -> Pending:
    """Start to sum `x`, any shape, over `axis` for its rank `owner`, in place. On other ranks `x` becomes undefined."""
    return _start("reduce", axis, x, dist.reduce, x, axis.ranks[owner])


def start_broadcast(x: Tensor, owner: int, axis: Axis) -> Pending:
    """Start to replace `x`, any shape, by that of rank `owner` of `axis`, in place."""
    return _start("broadcast", axis, x, dist.broadcast, x, axis.ranks[owner])


def all_reduce_sum(x: Tensor, *axes: Axis) -> Tensor:
    """Replace `x`, any shape, by its sum over one or more axes, in place."""
    for axis in axes:
        start_all_reduce(x, axis).wait()
    return x


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """Replace `x`, any shape, by its maximum over `axis`, in place."""
    return _start("all-reduce", axis, x, dist.all_reduce, x, dist.ReduceOp.MAX).wait()


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenate `x` [n, ...] of all ranks of `axis` to [n · size, ...]."""
    return start_all_gather(x, axis).wait()


def broadcast(x: Tensor, axis: Axis) -> Tensor:
    """Replace `x`, any shape, by that of the first rank of `axis`, in place."""
    return start_broadcast(x, 0, axis).wait()


def host_max(values: Sequence[int], axis: Axis) -> list[int]:
    """Maximum over `axis`, which has a gloo group, of each value of the host.

    Rank r receives from r - 1, r - 2, r - 4, ... what these have received so far (Hensgen, Finkel and Manber 1988).
    That is ceil(log2 size) messages one after the other, where gloo's all-reduce has 2 (size - 1).
    """
    x, distance = torch.tensor(values), 1
    while distance < axis.size:
        received = x.clone()
        with named("agreement", axis):  # with a tag of its own, beside transfers of a pipeline
            sending = dist.isend(x, group=axis.group, group_dst=(axis.rank + distance) % axis.size, tag=1)
            dist.recv(received, group=axis.group, group_src=(axis.rank - distance) % axis.size, tag=1)
        Pending(x, sending, "agreement", axis).wait()
        x, distance = torch.maximum(x, received), 2 * distance
    return x.tolist()


def all_equal(value: int, axis: Axis) -> bool:
    """True if all ranks of `axis` have the same value, of less than 63 bits."""
    return sum(host_max([value, -value], axis)) == 0


def gather_texts(text: str, axis: Axis) -> list[str]:
    """Texts of all ranks of `axis`, in order. `axis` has a gloo backend for CPU tensors."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = all_gather(torch.tensor([len(data)]), axis).tolist()
    padded = torch.zeros(max(lengths) or 1, dtype=torch.uint8)
    padded[: len(data)] = data
    rows = all_gather(padded, axis).view(axis.size, -1)
    return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, lengths, strict=True)]


@contextmanager
def raise_on_all_ranks(axis: Axis, kind: type[Exception] = OSError) -> Iterator[None]:
    """Context in which an exception of `kind` on one rank of `axis` is raised on all of them, with its message."""
    failure: Exception | None = None
    try:
        yield
    except kind as error:
        failure = error
    if failed := host_max([0 if failure is None else axis.rank + 1], axis)[0]:
        messages = gather_texts(str(failure or ""), axis)
        raise failure or kind(f"rank {axis.ranks[failed - 1]}: {messages[failed - 1]}")


def local_shard(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part [n, ...] of `x` [n · size, ...], which all ranks of `axis` hold."""
    return x if axis.size == 1 else x.chunk(axis.size)[axis.rank].contiguous()


# A function of a tensor and the axis that it communicates over.
Collective = Callable[[Tensor, Axis], Tensor]


class _Communication(torch.autograd.Function):
    """A linear collective, with its transpose, which backward calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, collective: Collective, transpose: Collective) -> Tensor:
        ctx.axis, ctx.transpose = axis, transpose
        return collective(x.contiguous(), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.transpose(grad, ctx.axis), None, None, None


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """g of the paper: sum `x` over `axis`; backward is the identity."""
    return x if axis.size == 1 else _Communication.apply(x, axis, all_reduce_sum, lambda grad, _: grad)


def reduce_scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter [s, ...] to [s / size, ...] along the sequence; backward all-gathers the gradient."""
    return x if axis.size == 1 else _Communication.apply(x, axis, _reduce_scattered, all_gather)


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """All-gather [s, ...] to [s · size, ...] for computations that all ranks repeat; backward takes the local part."""
    return x if axis.size == 1 else _Communication.apply(x, axis, all_gather, local_shard)


def split_sequence(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part of [s, ...], which all ranks hold; backward all-gathers the gradient."""
    return x if axis.size == 1 else _Communication.apply(x, axis, local_shard, all_gather)


def gather_shards(x: Tensor, axis: Axis) -> Tensor:
    """All-gather [n, ...] to [n · size, ...] for computations that ranks divide; backward sums the gradient."""
    return x if axis.size == 1 else _Communication.apply(x, axis, all_gather, _reduce_scattered)


class Exchange:
    """An all-to-all of rows that starts here and ends in `wait`; backward returns the gradients to the senders.

    What is computed between the two overlaps with it, and so does its backward with the way back.
    """

    def __init__(self, x: Tensor, axis: Axis, sent: list[int], received: list[int]) -> None:
        """`sent[r]` rows of `x` go to each rank r of `axis`, in order, and `received[r]` come from it."""
        self.axis, self.sent, self.received = axis, sent, received
        self.pending: Pending | None = None
        self.started: Tensor | None = _StartExchange.apply(x, self)

    def wait(self) -> Tensor:
        """The received rows, by rank. They are not kept here, since the graph keeps this object until backward."""
        started, self.started = self.started, None
        return _EndExchange.apply(started, self)

    def end(self) -> Tensor:
        """Wait for the way there, or back."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending.wait()


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.pending = start_all_to_all(x, exchange.axis, exchange.sent, exchange.received)
        return exchange.pending.result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.end(), None  # `grad` is not that of the rows sent


class _EndExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.end()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.pending = start_all_to_all(grad, exchange.axis, exchange.received, exchange.sent)
        return grad, None


def _reduce_scattered(x: Tensor, axis: Axis) -> Tensor:
    return start_reduce_scatter(x, axis).wait()
