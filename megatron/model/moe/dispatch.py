"""From tokens to rows of their experts and back, on this rank and over the expert-parallel ranks.

A token has a copy for each of its experts; copy c is one of token c // copies. `Rows` says which copy each row holds.

Shapes in names: n tokens of this rank, k copies of a token, m rows, h hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.model.moe.experts import Experts
from megatron.model.moe.router import count
from megatron.ops.host_memory import upload
from megatron.parallel.collectives import Exchange, gather_shards, reduce_scatter_sequence, start_all_to_all
from megatron.parallel.mesh import Axis


@dataclasses.dataclass(frozen=True)
class Rows:
    """Copies of tokens, sorted by their experts.

    Attributes:
        source: [m], the copy in each row; n · k for a row of zeros.
        place: [n · k], the row of each copy; m for a copy that has none.
        copies: k.
        padded: there may be rows of zeros.
        complete: every copy has a row.
    """

    source: Tensor
    place: Tensor
    copies: int
    padded: bool
    complete: bool

    def take(self, x_nh: Tensor) -> Tensor:
        """The rows, [m, h]."""
        return _Take.apply(x_nh, self)

    def take_copies(self, x_nk: Tensor) -> Tensor:
        """One value for each row, [m], from those of all copies."""
        return dataclasses.replace(self, copies=1).take(x_nk.flatten())

    def add(self, x_mh: Tensor) -> Tensor:
        """Sum of each token's rows, [n, h]."""
        return _Add.apply(x_mh, self)


def sorted_rows(
    key: Tensor, groups: int, copies: int, *, capacity: int | None = None, multiple: int = 1
) -> tuple[Rows, list[int]]:
    """Rows of the copies whose `key` [n · k] is below `groups`, sorted by it, and the number of rows of each group.

    A group has as many rows as copies, rounded up to a multiple of `multiple`, or `capacity` rows. Zeros fill its end.
    Unless there is a capacity, the host waits for the numbers.
    """
    key = key.clamp(max=groups)
    counts = count(key, groups + 1)[:groups].long()
    order = key.argsort(stable=True)
    rank = torch.arange(len(key), device=key.device)
    place = torch.empty_like(order)
    if capacity is None:
        copies_of = counts.tolist()
        sizes, placed = [-(-number // multiple) * multiple for number in copies_of], sum(copies_of)
        complete = placed == len(key)
        if sum(sizes) == placed:
            place[order] = rank
            rows = Rows(order[:placed], place.clamp(max=placed), copies, padded=False, complete=complete)
            return rows, sizes
        size = torch.tensor(sizes, device=key.device)
    else:
        sizes, complete, size = [capacity] * groups, False, torch.full_like(counts, capacity)
    total, shift = sum(sizes), (size.cumsum(0) - size) - (counts.cumsum(0) - counts)
    group = key[order].clamp(max=groups - 1)  # of copies with a row
    place[order] = torch.where(key[order] < groups, rank + shift[group], total)
    source = torch.full((total + 1,), len(key), device=key.device)
    source[place] = torch.arange(len(key), device=key.device)
    return Rows(source[:total], place, copies, padded=True, complete=complete), sizes


def all_sorted_rows(key: Tensor, groups: int, copies: int) -> tuple[Rows, Tensor]:
    """`sorted_rows` of keys that are all below `groups`; the numbers of rows [groups] stay on the device."""
    order, place = key.argsort(stable=True), torch.empty_like(key)
    place[order] = torch.arange(len(key), device=key.device)
    return Rows(order, place, copies, padded=False, complete=True), count(key, groups).long()


class _Take(torch.autograd.Function):
    """Rows of tokens. Backward sums the gradients of a token's rows, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return _take(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _add(grad, ctx.rows), None


class _Add(torch.autograd.Function):
    """The transpose of `_Take`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return _add(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _take(grad, ctx.rows), None


def _take(x: Tensor, rows: Rows) -> Tensor:
    if rows.padded:
        x = _with_zero(x)
    return x[rows.source // rows.copies]


def _add(x: Tensor, rows: Rows) -> Tensor:
    if not rows.complete:
        x = _with_zero(x)
    by_token = x[rows.place].unflatten(0, (-1, rows.copies))
    return by_token.squeeze(1) if rows.copies == 1 else by_token.sum(1)


def _with_zero(x: Tensor) -> Tensor:
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))


def by_all_to_all(
    x_nh: Tensor,
    weights_nk: Tensor,
    indices_nk: Tensor,
    experts: Experts,
    axis: Axis,
    parts: int,
    capacity: int | None,
    drops: bool,
    meanwhile: Callable[[], None],
) -> Tensor:
    """Weighted sum of the outputs of each token's experts, [n, h]: each row goes to the ranks that hold its expert.

    Args:
        indices_nk: the experts; those of copies to drop are the number of all experts.
        parts: ranks that share each expert; a row goes to all of them, and their outputs are summed.
        capacity: rows that this rank sends to each expert, padded; None for as many as there are.
        drops: there may be copies to drop.
        meanwhile: called while the rows are on their way.
    """
    local = len(experts.local)
    owner, expert = indices_nk // local, indices_nk % local
    part = torch.arange(parts, device=x_nh.device)
    key = ((owner.unsqueeze(-1) * parts + part) * local + expert.unsqueeze(-1)).flatten()
    multiple = experts.row_multiple(len(key)) if axis.size == 1 else 1
    groups, copies = axis.size * local, indices_nk.shape[1] * parts
    sizes: list[int] | Tensor
    if not drops and (axis.size > 1 or (experts.grouped and multiple == 1)):
        rows, sizes = all_sorted_rows(key, groups, copies)
    else:
        rows, sizes = sorted_rows(key, groups, copies, capacity=capacity, multiple=multiple)
    x_mh = rows.take(x_nh)
    weights_m = rows.take_copies(weights_nk.unsqueeze(-1).expand(-1, -1, parts))
    if axis.size == 1:
        meanwhile()
        return rows.add(experts(x_mh, weights_m, sizes))
    sizes = upload(torch.tensor(sizes), x_nh.device) if isinstance(sizes, list) else sizes
    sizes_rl = sizes.view(axis.size, local)
    ones = [1] * axis.size
    received_rl = start_all_to_all(sizes_rl, axis, ones, ones).wait()
    sent, received = torch.stack((sizes_rl, received_rl)).sum(2).tolist()
    rows_there = Exchange(x_mh, axis, sent, received)
    weights_there = Exchange(weights_m, axis, sent, received)
    meanwhile()
    x_mh, weights_m = rows_there.wait(), weights_there.wait()
    # From the order of ranks, each with its rows by expert, to that of experts.
    expert_of_row = torch.arange(local, device=x_nh.device).repeat(axis.size)
    key = expert_of_row.repeat_interleave(received_rl.flatten(), output_size=sum(received))
    multiple = experts.row_multiple(len(key))
    if experts.grouped and multiple == 1:
        regrouped, sizes = all_sorted_rows(key, local, 1)
    else:
        regrouped, sizes = sorted_rows(key, local, 1, multiple=multiple)
    y_mh = experts(regrouped.take(x_mh), regrouped.take_copies(weights_m), sizes)
    return rows.add(Exchange(regrouped.add(y_mh), axis, received, sent).wait())


def by_all_gather(
    x_nh: Tensor, weights_nk: Tensor, indices_nk: Tensor, experts: Experts, axis: Axis, capacity: int | None
) -> Tensor:
    """As `by_all_to_all`, but every rank gets all tokens and takes those of its experts."""
    x_nh, weights_nk = gather_shards(x_nh, axis), gather_shards(weights_nk, axis)
    indices_nk = gather_shards(indices_nk, axis)
    local, key = experts.local, indices_nk - experts.local.start
    key = key.masked_fill((key < 0) | (key >= len(local)), len(local)).flatten()
    capacity = None if capacity is None else capacity * axis.size
    multiple = experts.row_multiple(len(key) // axis.size)
    rows, sizes = sorted_rows(key, len(local), indices_nk.shape[1], capacity=capacity, multiple=multiple)
    y_nh = rows.add(experts(rows.take(x_nh), rows.take_copies(weights_nk), sizes))
    return reduce_scatter_sequence(y_nh, axis)
