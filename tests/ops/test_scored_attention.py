"""Attention by blocks of queries against all scores in fp64, its memory, and the randomness of its dropout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.ops import scored_attention as module
from megatron.ops.attention import MaskSpec, causal_mask, make_mask
from megatron.ops.cpu.document_attention import make_document_mask, scored_attention_by_document
from megatron.ops.scored_attention import (
    ScoreRules,
    draw_words,
    kept_pairs,
    scored_attention,
    whole_pairs,
)
from megatron.parallel.random import stable_hash

CPU = torch.device("cpu")
B, N, G, S, D = 2, 4, 2, 40, 8
WORDS = torch.tensor([3, -9], dtype=torch.int32)


def dense(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, rules: ScoreRules, sinks_n: Tensor | None
) -> Tensor:
    """The definition, with all scores at once."""
    s, t = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(N // G, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / D**0.5
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    if rules.slopes_n is not None:
        distance = torch.arange(t - s, t).unsqueeze(1) - torch.arange(t)
        scores = scores - rules.slopes_n.view(-1, 1, 1) * distance
    exponentials = scores.exp() * allowed
    total = exponentials.sum(-1, keepdim=True)
    if sinks_n is not None:
        total = total + sinks_n.exp().view(-1, 1, 1)
    weights = exponentials / total.clamp(min=1e-300)
    if rules.dropout > 0:
        weights = weights * kept_pairs(rules, B, N, whole_pairs(0, t, s, CPU)) / (1 - rules.dropout)
    return weights @ v


@pytest.mark.parametrize("mask", ["causal", "later queries", "none", "documents", "keys"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "rules",
    [
        ScoreRules(dropout=0.3, words=WORDS),
        ScoreRules(softcap=0.7),
        ScoreRules(
            softcap=0.7, dropout=0.3, words=WORDS, slopes_n=torch.tensor([0.5, 0.2, 0.1, 0.0]).double()
        ),
    ],
    ids=["dropout", "soft cap", "all"],
)
def test_equals_all_scores_at_once(
    monkeypatch: pytest.MonkeyPatch, rules: ScoreRules, sinks: bool, mask: str
) -> None:
    """Values and gradients, in several blocks of queries."""
    monkeypatch.setattr(module, "MAX_QUERIES", 16)
    torch.manual_seed(1)
    queries = 24 if mask == "later queries" else S
    shapes = [(B, n, s, D) for n, s in ((N, queries), (G, S), (G, S))]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sinks_n = torch.randn(N, dtype=torch.float64, requires_grad=True) if sinks else None
    ids_bs = (torch.rand(B, S) < 0.03).cumsum(1)
    spec = MaskSpec(length=S, document_ids_bs=ids_bs, device=CPU)
    allowed, given, causal = {
        "causal": (causal_mask(S, S, CPU)[None], None, True),
        "later queries": (causal_mask(queries, S, CPU)[None], None, True),
        "none": (torch.ones(1, 1, 1, 1, dtype=torch.bool), None, False),
        "documents": (make_mask(spec), make_document_mask(spec), True),
        "keys": ((torch.arange(S) < torch.tensor([[30], [0]]))[:, None, None],) * 2 + (False,),
    }[mask]
    out = scored_attention_by_document(*inputs, mask_bnst=given, causal=causal, rules=rules, sinks_n=sinks_n)
    expected = dense(*inputs, allowed, rules, sinks_n)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weight, sources = torch.randn_like(out), [*inputs, *([] if sinks_n is None else [sinks_n])]
    ours, theirs = (torch.autograd.grad((x * weight).sum(), sources) for x in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


class Largest(TorchDispatchMode):
    """Remembers the elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage():
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_memory_grows_with_the_sequence_not_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_SCORES", 2**10)
    rules, largest = ScoreRules(softcap=5.0, dropout=0.1, words=WORDS), []
    for s in (256, 512):
        q, k, v = (torch.randn(1, 2, s, 4, requires_grad=True) for _ in "qkv")
        with Largest() as mode:
            scored_attention(q, k, v, mask_bnst=None, causal=True, rules=rules).sum().backward()
        largest.append(mode.elements)
    assert largest == [2 * 16 * 256, 2 * 16 * 512]  # 16 queries of two heads


def test_dropped_weights_are_a_function_of_positions() -> None:
    """Parts of rows, heads, queries and keys have the bits of the whole, whose share is 1 - p."""
    rules = ScoreRules(dropout=0.25, words=WORDS)
    whole = kept_pairs(rules, 4, 8, whole_pairs(0, 128, 128, CPU))
    part = whole_pairs(32, 96, 16, CPU)
    moved = ScoreRules(dropout=0.25, words=WORDS, first_row=1, first_head=3)
    assert torch.equal(kept_pairs(moved, 2, 4, part), whole[1:3, 3:7, 80:96, 32:96])


def test_dropped_weights_are_random() -> None:
    """Bits of one tensor, and of two keys, are independent as far as 4 million of them can tell."""
    keys = []
    for seed in range(2):
        torch.manual_seed(stable_hash(seed, bits=32))
        keys.append(draw_words(CPU))
    bits, other = (
        kept_pairs(ScoreRules(dropout=0.25, words=key), 4, 16, whole_pairs(0, 256, 256, CPU)).float() - 0.75
        for key in keys
    )
    variance = 0.25 * 0.75
    assert bits.var().item() == pytest.approx(variance, rel=2e-3)
    # Sums along each dimension vary as those of independent bits do: the variance of a variance of n is 2 / n.
    for dim in range(4):
        sums = bits.sum(dim).flatten() / (variance * bits.shape[dim]) ** 0.5
        assert abs(sums.square().mean().item() - 1) < 5 * (2 / len(sums)) ** 0.5
    shifted = [bits.roll(shifts, dims) for shifts, dims in ((1, 3), (1, 2), (1, 1), (1, 0), ((1, 1), (2, 3)))]
    for x, y in [*((bits, x) for x in shifted), (bits, other), *itertools.combinations(shifted, 2)]:
        correlation = (x * y).mean().item() / variance
        assert abs(correlation) < 5 / bits.numel() ** 0.5
