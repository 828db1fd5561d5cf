"""Attention within documents on a CPU, one document at a time, in place of a dense mask.

Pairs of a query and a key of different documents are not computed, and torch's kernel skips the blocks above the
diagonal of each document, forward and backward.

Shapes in names: b batch, n query heads, g key/value heads (groups), s queries, d head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megatron.ops.attention import MaskSpec, make_mask
from megatron.ops.cpu.attention import padded_attention
from megatron.ops.scored_attention import ScoreRules, draw_words, scored_attention

# Neighbors of at most so many tokens together are one segment, since a call of the kernel takes longer than their
# scores.
MERGED_LENGTH = 64


@dataclasses.dataclass(frozen=True)
class Segment:
    """Neighboring positions of one sequence that attend to no others: a document, or several short ones.

    Attributes:
        length: number of positions.
        mask_11ss: the pairs that attend; None where `DocumentMask.spec.causal` says it all.
    """

    length: int
    mask_11ss: Tensor | None


@dataclasses.dataclass(frozen=True)
class DocumentMask:
    """The mask of a microbatch: the segments of each of its sequences, in order, and the description they are of."""

    rows: Sequence[Sequence[Segment]]
    spec: MaskSpec

    def dense(self) -> Tensor | None:
        """The same mask as a tensor [b, 1, s, s]."""
        return make_mask(self.spec)


def attention_by_document(
    whole: Callable[..., Tensor],
    q_bnsd: Tensor,
    k_bgsd: Tensor,
    v_bgsd: Tensor,
    *,
    mask_bnst: Tensor | DocumentMask | None,
    causal: bool,
    dropout: float,
) -> Tensor:
    """`megatron.ops.attention.attention`, where the mask may also be that of `make_document_mask`.

    Args:
        whole: computes attention with any other mask.
    """
    if not isinstance(mask_bnst, DocumentMask):
        return whole(q_bnsd, k_bgsd, v_bgsd, mask_bnst=mask_bnst, causal=causal, dropout=dropout)
    outs = []
    # Backward of `split` concatenates the gradients; that of a slice would write one as long as the sequence.
    for q, k, v, segments in zip(
        q_bnsd.split(1), k_bgsd.split(1), v_bgsd.split(1), mask_bnst.rows, strict=True
    ):
        lengths = [segment.length for segment in segments]
        parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), segments, strict=True)
        outs.append(
            torch.cat(
                [
                    padded_attention(*qkv, mask_bnst=segment.mask_11ss, causal=causal, dropout=dropout)
                    for *qkv, segment in parts
                ],
                dim=2,
            )
        )
    return torch.cat(outs)


def scored_attention_by_document(
    q_bnsd: Tensor,
    k_bgsd: Tensor,
    v_bgsd: Tensor,
    *,
    mask_bnst: Tensor | DocumentMask | BlockMask | None,
    causal: bool,
    rules: ScoreRules,
    sinks_n: Tensor | None = None,
) -> Tensor:
    """`scored_attention`, where the mask may also be that of `make_document_mask`."""
    settings: dict[str, Any] = {"causal": causal, "sinks_n": sinks_n}
    if not isinstance(mask_bnst, DocumentMask):
        return scored_attention(q_bnsd, k_bgsd, v_bgsd, mask_bnst=mask_bnst, rules=rules, **settings)
    outs = []
    rows = zip(q_bnsd.split(1), k_bgsd.split(1), v_bgsd.split(1), mask_bnst.rows, strict=True)
    for row, (*row_qkv, segments) in enumerate(rows):
        settings["rules"] = dataclasses.replace(rules, first_row=rules.first_row + row)
        lengths = [segment.length for segment in segments]
        parts = zip(
            *(x.split(lengths, dim=2) for x in row_qkv),
            segments,
            accumulate(lengths, initial=0),
            strict=False,
        )
        outs.append(
            torch.cat(
                [
                    scored_attention(*qkv, mask_bnst=segment.mask_11ss, begin=begin, **settings)
                    for *qkv, segment, begin in parts
                ],
                dim=2,
            )
        )
    return torch.cat(outs)


def attention_with_dropout(
    without: Callable[..., Tensor],
    q_bnsd: Tensor,
    k_bgtd: Tensor,
    v_bgtd: Tensor,
    *,
    mask_bnst: Tensor | DocumentMask | None,
    causal: bool,
    dropout: float,
) -> Tensor:
    """`megatron.ops.attention.attention` whose dropout depends on positions alone; `without` has none."""
    tensors = q_bnsd, k_bgtd, v_bgtd
    if dropout == 0:
        return without(*tensors, mask_bnst=mask_bnst, causal=causal, dropout=0.0)
    rules = ScoreRules(dropout=dropout, words=draw_words(q_bnsd.device))
    return scored_attention_by_document(*tensors, mask_bnst=mask_bnst, causal=causal, rules=rules)


def make_document_mask(spec: MaskSpec) -> Tensor | DocumentMask | None:
    """The mask of a microbatch on a CPU; None where `causal` says it all, and dense if no document ends in it."""
    if spec.document_ids_bs is None:
        return make_mask(spec)
    lengths = document_lengths(spec.document_ids_bs)
    if all(len(row) == 1 for row in lengths):
        return make_mask(dataclasses.replace(spec, document_ids_bs=None))
    rows = [
        list(_segments(spec, ids_s, row)) for ids_s, row in zip(spec.document_ids_bs, lengths, strict=True)
    ]
    return DocumentMask(rows, spec)


def document_lengths(document_ids_bs: Tensor) -> list[list[int]]:
    """Tokens of each document, or part of one, in each sequence. Ids do not decrease along s."""
    rows = []
    for ids_s in document_ids_bs:
        starts = (ids_s.diff().nonzero().flatten() + 1).tolist()
        rows.append([end - begin for begin, end in pairwise([0, *starts, len(ids_s)])])
    return rows


def _segments(spec: MaskSpec, ids_s: Tensor, lengths: Sequence[int]) -> Iterator[Segment]:
    """Divide a sequence of documents into segments."""
    begin, number, length = 0, 0, 0  # of the segment that grows

    def segment() -> Segment:
        if number == 1:
            has_window = spec.window is not None and spec.window < length - 1
            alone = dataclasses.replace(spec, length=length, document_ids_bs=None)
            return Segment(length, make_mask(alone) if has_window else None)
        ids_1s = ids_s[begin : begin + length].unsqueeze(0)
        return Segment(length, make_mask(dataclasses.replace(spec, length=length, document_ids_bs=ids_1s)))

    for added in lengths:
        if number and length + added > MERGED_LENGTH:
            yield segment()
            begin, number, length = begin + length, 0, 0
        number, length = number + 1, length + added
    yield segment()
