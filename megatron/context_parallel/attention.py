"""Attention over a sequence that ranks divide: ring attention, gathered keys, an all-to-all over heads, or two levels.

The ranks form a grid of R x H: the H ranks of a group exchange heads for positions (arXiv 2309.14509), after which each
has n / H heads of the group's positions. Keys and values then meet the queries of the R groups: they travel around the
ring of groups (arXiv 2310.01889), or each rank gathers them all. A part of the keys gives a partial softmax, and parts
are joined by their log-sum-exp. The groups divide the sequence as R ranks do (`megatron/data/zigzag.py`).
Documents are computed one at a time, except by a ring on a GPU, which has masks.

Shapes in names: b batch, n query heads, g key/value heads (groups), s positions of this rank, t keys, d head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.blocks import Block, Range, blocks, pairs, pairs_mask
from megatron.context_parallel.heads import attend_by_heads
from megatron.context_parallel.kernels import partial_attention, partial_attention_backward
from megatron.data.zigzag import Zigzag
from megatron.ops.attention import MaskSpec
from megatron.ops.backend import Ops
from megatron.ops.cpu.document_attention import scored_attention_by_document
from megatron.ops.scored_attention import (
    ScoreRules,
    add_sinks,
    draw_words,
    scored_partial_attention,
    scored_partial_attention_backward,
    sinks_grad,
)
from megatron.parallel.collectives import (
    Pending,
    all_gather,
    start_reduce_scatter,
    start_shift,
)
from megatron.parallel.mesh import Axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextMask:
    """The keys that a query may attend to, on whichever rank they are.

    Attributes:
        spec: of the whole sequence.
        zigzag: division of the sequence by the ring.
        whole: the mask of `Ops.attention` for the whole sequence; None where the spec is not needed as one.
        blocks: those of this rank's queries and the keys of each rank of the ring, if there is one.
    """

    spec: MaskSpec
    zigzag: Zigzag
    whole: Any = None
    blocks: tuple[tuple[Block, ...], ...] = ()


class ContextAttention:
    """The fields `attention` and `make_mask` of `Ops` under context parallelism.

    Attributes:
        heads: ranks that exchange heads for positions.
        ring: ranks between which keys and values move.
        gathers: they are gathered instead of sent around.
        inner: operations of one process.
    """

    def __init__(self, cp: Axis, heads: Axis, ring: Axis, *, gathers: bool, inner: Ops) -> None:
        self.cp, self.heads, self.ring, self.gathers, self.inner = cp, heads, ring, gathers, inner

    def make_mask(self, spec: MaskSpec) -> ContextMask:
        """The mask of the whole sequence from a spec with the documents and the padding of this rank's positions."""
        ring = self.ring
        zigzag = Zigzag.of(spec.length, self.cp.size, documents=spec.document_ids_bs is not None)
        spec = dataclasses.replace(
            spec,
            document_ids_bs=self._whole(spec.document_ids_bs, zigzag),
            padding_mask_bs=self._whole(spec.padding_mask_bs, zigzag),
        )
        zigzag = dataclasses.replace(zigzag, size=ring.size)
        if ring.size > 1:
            of_sources = (blocks(spec, zigzag, ring.rank, source) for source in range(ring.size))
            return ContextMask(spec=spec, zigzag=zigzag, blocks=tuple(map(tuple, of_sources)))
        if spec.padding_mask_bs is not None:
            assert not spec.causal and spec.window is None and spec.document_ids_bs is None
            return ContextMask(spec=spec, zigzag=zigzag, whole=spec.padding_mask_bs.bool()[:, None, None])
        return ContextMask(spec=spec, zigzag=zigzag, whole=self.inner.make_mask(spec))

    def _whole(self, x_bs: Tensor | None, zigzag: Zigzag) -> Tensor | None:
        """The positions of all ranks in order."""
        if x_bs is None:
            return None
        parts = all_gather(x_bs.t().contiguous(), self.cp).unflatten(0, (self.cp.size, -1))
        return zigzag.restore(parts).t()

    def attention(
        self,
        q_bnsd: Tensor,
        k_bgsd: Tensor,
        v_bgsd: Tensor,
        *,
        mask_bnst: ContextMask,
        causal: bool,
        dropout: float,
        softcap: float | None = None,
        sinks_n: Tensor | None = None,
    ) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks, [b, n, s, d].

        `softcap` and `sinks_n` are as in `megatron.ops.scored_attention`.
        """
        # The ranks of a sequence have seeded their generators alike.
        words = draw_words(q_bnsd.device) if dropout > 0 else None
        rules = ScoreRules(softcap=softcap, slopes_n=mask_bnst.spec.slopes_n, dropout=dropout, words=words)
        return self.inner.communicate(self._attend, q_bnsd, k_bgsd, v_bgsd, sinks_n, mask_bnst, causal, rules)

    def _attend(
        self,
        q_bnsd: Tensor,
        k_bgsd: Tensor,
        v_bgsd: Tensor,
        sinks_n: Tensor | None,
        mask_bnst: ContextMask,
        causal: bool,
        rules: ScoreRules,
    ) -> Tensor:
        if self.heads.size == 1:
            return self._attend_at_positions(q_bnsd, k_bgsd, v_bgsd, sinks_n, mask_bnst, causal, rules)
        # Those of this rank.
        heads, slopes_n = q_bnsd.shape[1] // self.heads.size, rules.slopes_n
        mine = slice(self.heads.rank * heads, (self.heads.rank + 1) * heads)
        rules = dataclasses.replace(
            rules, first_head=mine.start, slopes_n=None if slopes_n is None else slopes_n[mine]
        )
        sinks_n = None if sinks_n is None else sinks_n[mine]
        size = self.heads.size
        group = dataclasses.replace(mask_bnst.zigzag, length=size * q_bnsd.shape[2], size=size)
        return attend_by_heads(
            lambda q, k, v: self._attend_at_positions(q, k, v, sinks_n, mask_bnst, causal, rules),
            *(q_bnsd, k_bgsd, v_bgsd),
            heads=self.heads,
            zigzag=group,
            run=self.inner.run,
        )

    def _attend_at_positions(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_n: Tensor | None,
        mask: ContextMask,
        causal: bool,
        rules: ScoreRules,
    ) -> Tensor:
        """Attention of some heads between the positions of the groups of the ring."""
        plain = dataclasses.replace(rules, first_head=0) == ScoreRules() and sinks_n is None
        if self.ring.size > 1:
            return _Attention.apply(q, k, v, sinks_n, mask, None if plain else rules, self.ring, self.gathers)
        if plain:
            # Compiled with layers: FlexAttention computes all scores where it is not compiled.
            return self.inner.run(_attention_of, self.inner.attention, q, k, v, mask.whole, causal)
        return scored_attention_by_document(
            q, k, v, mask_bnst=mask.whole, causal=causal, rules=rules, sinks_n=sinks_n
        )


def _attention_of(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool
) -> Tensor:
    return attention(q, k, v, mask_bnst=mask, causal=causal, dropout=0.0)


class _Attention(torch.autograd.Function):
    """Attention of this rank's queries [b, n, s, d] to the keys and values of all ranks of `ring`, [b, g, s, d] here.

    Saves no scores and no keys of other ranks: backward moves them again. `rules` and `sinks_n` are those of
    `megatron.ops.scored_attention`; None for the softmax alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_n: Tensor | None,
        mask: ContextMask,
        rules: ScoreRules | None,
        ring: Axis,
        gathers: bool,
    ) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        total = lse = None
        keys_values = torch.cat((k, v), -1)
        for source, kv in (_gathered if gathers else _around)(keys_values, ring):
            for block in mask.blocks[source]:
                tensors, ranks = (_queries(q, block), *_keys(kv, block, k)), (ring.rank, source)
                if rules is None:
                    mask_bnst = pairs_mask(block, mask.spec, mask.zigzag, *ranks)
                    part, part_lse = partial_attention(*tensors, mask_bnst, causal=block.causal)
                else:
                    block_pairs = pairs(block, mask.spec, mask.zigzag, *ranks)
                    part, part_lse = scored_partial_attention(*tensors, block_pairs, _rules(rules, block))
                if total is None or lse is None:
                    total, lse = _first(part, part_lse, q, block, dtype)
                else:
                    _join(_queries(total, block), _queries(lse, block), part, part_lse)
        if total is None or lse is None:  # without sequences, since a query attends to itself
            total, lse = (
                q.new_empty(*q.shape[:3], v.shape[-1], dtype=dtype),
                q.new_empty(q.shape[:3], dtype=dtype),
            )
        if sinks_n is not None:
            total, lse = add_sinks(total, lse, sinks_n)
        out = total.to(q.dtype)
        ctx.mask, ctx.rules, ctx.ring, ctx.gathers = mask, rules, ring, gathers
        ctx.save_for_backward(q, k, v, sinks_n, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_n, out, lse = ctx.saved_tensors
        ring, rules, mask, dtype = ctx.ring, ctx.rules, ctx.mask, lse.dtype
        grad_q = torch.zeros_like(q, dtype=dtype)
        keys_values = torch.cat((k, v), -1)
        grads = (_GatheredGrads if ctx.gathers else _GradsAround)(keys_values, ring, dtype)
        for source, kv in (_gathered if ctx.gathers else _around)(keys_values, ring):
            grad_kv = grads.of(source)
            for block in mask.blocks[source]:
                tensors = (
                    _queries(grad, block),
                    _queries(q, block),
                    *_keys(kv, block, k),
                    _queries(out, block),
                    _queries(lse, block),
                )
                ranks = ring.rank, source
                if rules is None:
                    mask_bnst = pairs_mask(block, mask.spec, mask.zigzag, *ranks)
                    block_grads = partial_attention_backward(*tensors, mask_bnst, causal=block.causal)
                else:
                    block_pairs, block_rules = (
                        pairs(block, mask.spec, mask.zigzag, *ranks),
                        _rules(rules, block),
                    )
                    block_grads = scored_partial_attention_backward(*tensors, block_pairs, block_rules)
                block_q, block_k, block_v = block_grads
                _queries(grad_q, block).add_(block_q)
                grad_k, grad_v = _keys(grad_kv, block, k)
                grad_k.add_(block_k)
                grad_v.add_(block_v)
            grads.done(grad_kv)
        grad_k, grad_v = grads.local().to(k.dtype).split((k.shape[-1], v.shape[-1]), -1)
        grad_sinks = None if sinks_n is None else sinks_grad(grad, out, lse, sinks_n)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_sinks, None, None, None, None


def _queries(x: Tensor, block: Block) -> Tensor:
    """The queries of a block in [b, n, s, ...]."""
    return _rows(x, block.sequences, block.queries)


def _keys(kv: Tensor, block: Block, k: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a block, or what has their place."""
    part, d = _rows(kv, block.sequences, block.keys), k.shape[-1]
    return part[..., :d], part[..., d:]


def _rows(x: Tensor, sequences: Range | None, rows: Range) -> Tensor:
    """Some rows of some sequences, or of all, in [b, n, s, ...]."""
    for dim, part in ((0, sequences), (2, rows)):
        if part is not None and part[1] - part[0] < x.shape[dim]:
            x = x.narrow(dim, part[0], part[1] - part[0])
    return x


def _rules(rules: ScoreRules, block: Block) -> ScoreRules:
    """The rules for the sequences of a block."""
    first = 0 if block.sequences is None else block.sequences[0]
    return dataclasses.replace(rules, first_row=rules.first_row + first)


def _first(
    out: Tensor, out_lse: Tensor, q: Tensor, block: Block, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output and lse of all queries after the first block, which has some of them."""
    if q.shape[:3] == out.shape[:3] and out.transpose(1, 2).is_contiguous():
        return out.to(dtype), out_lse.to(dtype)
    # Heads come last in memory: so the next layer reads the output as it is, and nothing keeps a copy.
    b, n, s, _ = q.shape
    total = q.new_zeros(b, s, n, out.shape[-1], dtype=dtype).transpose(1, 2)
    lse = q.new_full((b, n, s), -torch.inf, dtype=dtype)
    _queries(total, block).copy_(out)
    _queries(lse, block).copy_(out_lse)
    return total, lse


def _join(total: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Join a part's output and lse with those of the parts before, in place.

    Of two parts with the sums of exponentials a and b, the second has the weight b / (a + b) = sigmoid(log b - log a).
    """
    out_lse = out_lse.to(lse.dtype)
    # Rows that no part has keys for have the lse -inf, and -inf - -inf is not a number.
    share = torch.sigmoid(out_lse - lse).nan_to_num_(0.0)
    total.lerp_(out.to(total.dtype), share.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, out_lse))


def _around(kv: Tensor, ring: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's keys and values as they come around the ring; the next ones arrive meanwhile."""
    for step in range(ring.size):
        following = start_shift(kv, ring) if step < ring.size - 1 else Pending(kv)
        yield (ring.rank - step) % ring.size, kv
        kv = following.wait()


def _gathered(kv: Tensor, ring: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's keys and values after an all-gather."""
    yield from enumerate(all_gather(kv.unsqueeze(0), ring))


class _GradsAround:
    """Gradients of keys and values that follow them around the ring, a step behind."""

    def __init__(self, kv: Tensor, ring: Axis, dtype: torch.dtype) -> None:
        self.ring, self.shape, self.dtype = ring, kv.shape, dtype
        self.arriving: Pending | None = None
        self.device = kv.device

    def of(self, source: int) -> Tensor:
        """A zero sum for this rank's part of the gradients of a rank's keys and values."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def done(self, grad: Tensor) -> None:
        """Add the parts of the ranks before, and send the sum on."""
        if self.arriving is not None:
            grad += self.arriving.wait()
        self.arriving = start_shift(grad, self.ring)

    def local(self) -> Tensor:
        """The gradients of this rank's keys and values."""
        assert self.arriving is not None
        return self.arriving.wait()


class _GatheredGrads:
    """Gradients of the keys and values of all ranks, which a reduce-scatter sums."""

    def __init__(self, kv: Tensor, ring: Axis, dtype: torch.dtype) -> None:
        self.ring = ring
        self.grads = torch.zeros(ring.size, *kv.shape, dtype=dtype, device=kv.device)

    def of(self, source: int) -> Tensor:
        return self.grads[source]

    def done(self, grad: Tensor) -> None:
        pass

    def local(self) -> Tensor:
        return start_reduce_scatter(self.grads, self.ring).wait()[0]


def split_axis(cp: Axis, heads: int) -> tuple[list[int], list[int]]:
    """Ranks that exchange heads with this one, groups of `heads` neighbors, and those of the same place in all groups.

    A group's chunks lie side by side, so that the groups divide the sequence in zigzag too.
    """
    begin = cp.rank // heads * heads
    ranks = list(cp.ranks)
    return ranks[begin : begin + heads], ranks[cp.rank % heads :: heads]
