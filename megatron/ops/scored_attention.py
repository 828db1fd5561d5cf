"""Attention with what fused kernels lack: soft caps, a bias by distance, sinks, and dropout keyed by position.

Scores exist for one block of queries at a time, in forward and in backward, which computes them again from the
logarithm of the sum of exponentials (arXiv 2307.08691 section 3.1). So memory does not grow with the square of the
sequence. A part of the keys gives a partial softmax, which context parallelism joins with others.

Shapes in names: b batch, n query heads, g key/value heads (groups), r query heads of a group, s queries, t keys, d head
width, w width of values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megatron.ops.document_attention import dense_mask

# Scores of a block in all heads and sequences, and the fewest and most queries of one.
BLOCK_SCORES, MIN_QUERIES, MAX_QUERIES = 2**21, 16, 128
# Pairs whose random bits are computed at once, which stay in a CPU's cache.
PAIRS_AT_ONCE = 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreRules:
    """Rules by which scores become weights, besides the softmax.

    Attributes:
        softcap: bound c of the scores, c tanh(score / c).
        slopes_n: bias of each head for every position that the key is before the query (ALiBi).
        dropout: probability of dropping a weight.
        words: int32 [2], random; the dropped weights depend on them, and on sequence, head and positions.
        first_row, first_head: index of the inputs' first sequence and head among those that the words are for.
    """

    softcap: float | None = None
    slopes_n: Tensor | None = None
    dropout: float = 0.0
    words: Tensor | None = None
    first_row: int = 0
    first_head: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """The keys that each query may attend to.

    Attributes:
        query_s, key_t: int32, positions in the whole sequence.
        mask_bnst: true where a query may attend to a key, or a bias of the scores; all but t may be 1. None means
            everywhere or, with `causal`, to no later key.
        causal: without a mask, the last query attends to all keys, the one before it to all but the last key, ...
    """

    query_s: Tensor
    key_t: Tensor
    mask_bnst: Tensor | None = None
    causal: bool = False

    def block(self, begin: int, end: int) -> Pairs:
        """Pairs of the queries from `begin` to `end` and the first keys, up to the last that one may attend to."""
        mask, keys = self.mask_bnst, len(self.key_t)
        if mask is not None:
            mask = mask[:, :, begin:end] if mask.shape[2] > 1 else mask
        elif self.causal:
            earlier = keys - len(self.query_s)  # than the first query
            keys = end + earlier
            mask_st = torch.ones(end - begin, keys, dtype=torch.bool, device=self.key_t.device)
            mask = mask_st.tril(begin + earlier)[None, None]
        return Pairs(query_s=self.query_s[begin:end], key_t=self.key_t[:keys], mask_bnst=mask)


def draw_words(device: torch.device) -> Tensor:
    """`ScoreRules.words`, drawn from torch's generator, which the caller has seeded."""
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)


def scored_attention(
    q_bnsd: Tensor,
    k_bgtd: Tensor,
    v_bgtw: Tensor,
    *,
    mask_bnst: Tensor | BlockMask | None,
    begin: int = 0,
    causal: bool,
    rules: ScoreRules,
    sinks_n: Tensor | None = None,
) -> Tensor:
    """`megatron.ops.attention.attention` by other rules, [b, n, s, w].

    Args:
        begin: position of the first key in the whole sequence.
        sinks_n: score of a further key of each head, which has no value.
    """
    if isinstance(mask_bnst, BlockMask):
        mask_bnst = dense_mask(mask_bnst)
    s, t = q_bnsd.shape[2], k_bgtd.shape[2]
    pairs = whole_pairs(begin, begin + t, s, q_bnsd.device, mask_bnst=mask_bnst, causal=causal)
    return _Attention.apply(q_bnsd, k_bgtd, v_bgtw, sinks_n, pairs, rules)


def whole_pairs(begin: int, end: int, queries: int, device: torch.device, **fields: Any) -> Pairs:
    """Pairs of the keys from position `begin` to `end` and the last `queries` of these positions, or all of them."""
    key_t = torch.arange(begin, end, dtype=torch.int32, device=device)
    return Pairs(query_s=key_t[-queries:], key_t=key_t, **fields)


def scored_partial_attention(
    q_bnsd: Tensor, k_bgtd: Tensor, v_bgtw: Tensor, pairs: Pairs, rules: ScoreRules
) -> tuple[Tensor, Tensor]:
    """Output [b, n, s, w] and lse [b, n, s] of attention over these keys, in fp32 (fp64 of fp64).

    A query that may attend to none of them has the output 0 and the lse -inf.
    """
    b, n, s, _ = q_bnsd.shape
    dtype = torch.promote_types(q_bnsd.dtype, torch.float32)
    # Heads come last in memory, as the next layer reads them.
    out_bnsw = q_bnsd.new_empty(b, s, n, v_bgtw.shape[-1], dtype=dtype).transpose(1, 2)
    lse_bns = q_bnsd.new_empty(b, n, s, dtype=dtype)
    for rows, block in _blocks(q_bnsd, k_bgtd, pairs):
        v = v_bgtw[:, :, : len(block.key_t)]
        scores, _ = _scores(q_bnsd[:, :, rows], k_bgtd[:, :, : len(block.key_t)], block, rules)
        largest = _finite(scores.amax(-1, keepdim=True))
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        lse_bns[:, :, rows] = (largest + total.log()).squeeze(-1)
        if rules.dropout > 0:
            weights *= kept_pairs(rules, b, n, block)
        out = (_by_group(weights.to(v.dtype), k_bgtd) @ v.unsqueeze(2)).flatten(1, 2)
        # The total of a row without keys is 0, as its output.
        torch.div(out, total.clamp_(min=1e-30).mul_(1 - rules.dropout), out=out_bnsw[:, :, rows])
    return out_bnsw, lse_bns


def scored_partial_attention_backward(
    grad_bnsw: Tensor,
    q_bnsd: Tensor,
    k_bgtd: Tensor,
    v_bgtw: Tensor,
    out_bnsw: Tensor,
    lse_bns: Tensor,
    pairs: Pairs,
    rules: ScoreRules,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, keys and values from the gradient, the output and the lse over all keys, sinks too.

    The three are in fp32 (fp64 of fp64).
    """
    b, n, _, d = q_bnsd.shape
    grad_q = torch.empty_like(q_bnsd, dtype=lse_bns.dtype)
    grad_k, grad_v = (torch.zeros_like(x, dtype=lse_bns.dtype) for x in (k_bgtd, v_bgtw))
    for rows, block in _blocks(q_bnsd, k_bgtd, pairs):
        keys = slice(len(block.key_t))
        q, k, v = q_bnsd[:, :, rows], k_bgtd[:, :, keys], v_bgtw[:, :, keys].unsqueeze(2)
        scores, slope = _scores(q, k, block, rules)
        weights = scores.sub_(_finite(lse_bns[:, :, rows]).unsqueeze(-1)).exp_()
        grad = _by_group(grad_bnsw[:, :, rows] / (1 - rules.dropout), k_bgtd)
        grad_weights = (grad @ v.transpose(-1, -2)).flatten(1, 2).to(weights.dtype)
        dropped = weights
        if rules.dropout > 0:
            kept = kept_pairs(rules, b, n, block)
            dropped, grad_weights = weights * kept, grad_weights.mul_(kept)
        dropped = _by_group(dropped.to(q.dtype), k_bgtd)
        grad_v[:, :, keys] += (dropped.transpose(-1, -2) @ grad).sum(2)
        mean = (grad_bnsw[:, :, rows].to(weights.dtype) * out_bnsw[:, :, rows]).sum(-1, keepdim=True)
        grad_scores = weights * grad_weights.sub_(mean)
        if slope is not None:
            grad_scores *= slope
        grad_scores = _by_group((grad_scores * d**-0.5).to(q.dtype), k_bgtd)
        grad_q[:, :, rows] = (grad_scores @ k.unsqueeze(2)).flatten(1, 2)
        grad_k[:, :, keys] += (grad_scores.transpose(-1, -2) @ _by_group(q, k_bgtd)).sum(2)
    return grad_q, grad_k, grad_v


def add_sinks(out_bnsw: Tensor, lse_bns: Tensor, sinks_n: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse of attention to one key more in each head, without a value and with these scores."""
    joint = torch.logaddexp(lse_bns, sinks_n.to(lse_bns.dtype).view(-1, 1))
    return out_bnsw * (lse_bns - joint).exp().unsqueeze(-1), joint


def sinks_grad(grad_bnsw: Tensor, out_bnsw: Tensor, lse_bns: Tensor, sinks_n: Tensor) -> Tensor:
    """Gradient of the sinks' scores, [n], from the output and the lse with them."""
    weights = (sinks_n.to(lse_bns.dtype).view(-1, 1) - lse_bns).exp()
    mean = (grad_bnsw.to(lse_bns.dtype) * out_bnsw).sum(-1)
    return -(weights * mean).sum((0, 2)).to(sinks_n.dtype)


class _Attention(torch.autograd.Function):
    """Saves its inputs, the output and the lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_n: Tensor | None, pairs: Pairs, rules: ScoreRules
    ) -> Tensor:
        out, lse = scored_partial_attention(q, k, v, pairs, rules)
        if sinks_n is not None:
            out, lse = add_sinks(out, lse, sinks_n)
        out = out.to(q.dtype)
        ctx.pairs, ctx.rules = pairs, rules
        ctx.save_for_backward(q, k, v, sinks_n, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_n, out, lse = ctx.saved_tensors
        grads = scored_partial_attention_backward(grad, q, k, v, out, lse, ctx.pairs, ctx.rules)
        grad_q, grad_k, grad_v = (x.to(y.dtype) for x, y in zip(grads, (q, k, v), strict=True))
        grad_sinks = None if sinks_n is None else sinks_grad(grad, out, lse, sinks_n)
        return grad_q, grad_k, grad_v, grad_sinks, None, None


def _blocks(q_bnsd: Tensor, k_bgtd: Tensor, pairs: Pairs) -> Iterator[tuple[slice, Pairs]]:
    """Yield the rows of each block of queries, and its pairs with the first keys."""
    b, n, s, _ = q_bnsd.shape
    t = k_bgtd.shape[2]
    size = min(max(BLOCK_SCORES // max(b * n * t, 1), MIN_QUERIES), MAX_QUERIES)
    for begin in range(0, s, size):
        end = min(begin + size, s)
        yield slice(begin, end), pairs.block(begin, end)


def _scores(q_bnsd: Tensor, k_bgtd: Tensor, pairs: Pairs, rules: ScoreRules) -> tuple[Tensor, Tensor | None]:
    """Scores [b, n, s, t] in fp32 (fp64 of fp64), and their derivative by those before the soft cap if there is one."""
    dtype, slope = torch.promote_types(q_bnsd.dtype, torch.float32), None
    scores = (_by_group(q_bnsd, k_bgtd) @ k_bgtd.unsqueeze(2).transpose(-1, -2)).flatten(1, 2).to(dtype)
    scores *= q_bnsd.shape[-1] ** -0.5
    if rules.softcap is not None:
        bounded = scores.div_(rules.softcap).tanh_()
        scores, slope = bounded * rules.softcap, 1 - bounded.square()
    if rules.slopes_n is not None:
        distance = pairs.key_t - pairs.query_s.unsqueeze(1)
        scores += rules.slopes_n.to(dtype).view(-1, 1, 1) * distance
    mask = pairs.mask_bnst
    if mask is not None and mask.dtype != torch.bool:  # a bias
        scores += mask
    elif mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return scores, slope


def kept_pairs(rules: ScoreRules, b: int, n: int, pairs: Pairs) -> Tensor:
    """Bool [b, n, s, t], false for dropped weights; a function of words, sequence, head and positions alone.

    Each row, a query of a head, has two words by a chain of hashes. A pair's random number is a hash of one of them and
    the key's position, into which the other enters on the way.
    """
    assert rules.words is not None
    device, (s, t) = pairs.key_t.device, (len(pairs.query_s), len(pairs.key_t))
    rows_b, heads_n = (
        torch.arange(first, first + size, dtype=torch.int32, device=device)
        for first, size in ((rules.first_row, b), (rules.first_head, n))
    )
    words = hashed(hashed(rules.words[0] + rows_b).unsqueeze(1) + heads_n)
    words = hashed(words.unsqueeze(2) + pairs.query_s).flatten()
    others = hashed(words ^ rules.words[1])
    keys_t = pairs.key_t * GOLDEN
    threshold = round(rules.dropout * 2**32) - 2**31
    kept = torch.empty(b * n * s, t, dtype=torch.bool, device=device)
    step = max(PAIRS_AT_ONCE // max(t, 1), 1)
    for word, other, out in zip(words.split(step), others.split(step), kept.split(step), strict=True):
        torch.ge(hashed(keys_t + word.unsqueeze(1), other.unsqueeze(1)), threshold, out=out)
    return kept.view(b, n, s, t)


# 2^32 over the golden ratio, and multipliers of "lowbias32", a hash whose every output bit changes with every input bit
# in half of the cases (C. Wellons, "Prospecting for hash functions", 2018); as signed numbers.
GOLDEN, FIRST, SECOND = 0x9E3779B9 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32


def hashed(x: Tensor, word: Tensor | None = None) -> Tensor:
    """Hash int32 numbers, in their memory; `word` enters halfway."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= FIRST
    if word is not None:
        x += word
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= SECOND
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _by_group(x_bns: Tensor, k_bgtd: Tensor) -> Tensor:
    """[b, n, s, ...] to [b, g, r, s, ...]."""
    return x_bns.unflatten(1, (k_bgtd.shape[1], -1))


def _finite(lse: Tensor) -> Tensor:
    """lse, or a finite number for a row without keys: exp(-inf - -inf) is not a number."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)
