"""The blocks of scores of two ranks' positions in a divided sequence (`megatron/data/zigzag.py`).

The rows of a rank are its positions in order. So those of a document lie side by side, and so do the keys of a rank
that a query may attend to.

Shapes in names: b batch, n heads, s queries, t keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron.data.zigzag import Zigzag
from megatron.ops.attention import MaskSpec
from megatron.ops.cpu.document_attention import MERGED_LENGTH, document_lengths
from megatron.ops.scored_attention import Pairs

Range = tuple[int, int]
# Blocks of two ranks on a GPU, where the lengths of documents are unknown.
MAX_BLOCKS = 8


@dataclasses.dataclass(frozen=True)
class Block:
    """Queries and keys of which some pairs attend.

    Attributes:
        sequences: range of the microbatch; None for all.
        queries, keys: ranges of the rows of their ranks.
        causal: the two have the same positions, and later keys are left out.
        masked: `pairs_mask` says which pairs attend; otherwise all do, or all but later keys.
    """

    sequences: Range | None
    queries: Range
    keys: Range
    causal: bool = False
    masked: bool = False


def blocks(spec: MaskSpec, zigzag: Zigzag, rank: int, source: int) -> Iterator[Block]:
    """The blocks of the queries of `rank` and the keys of `source`; those that no mask allows are left out.

    Causal attention without other masks is the same work for every pair of ranks: half of all pairs of positions.
    """
    ids_bs, rows, step = spec.document_ids_bs, zigzag.length // zigzag.size, zigzag.chunk
    if ids_bs is not None and ids_bs.is_cuda:
        step = max(step, -(-rows // MAX_BLOCKS))
    for sequences, span, masked in _spans(spec):
        queries, keys = (
            (rows_before(zigzag, r, span[0]), rows_before(zigzag, r, span[1])) for r in (rank, source)
        )
        if queries[0] == queries[1] or keys[0] == keys[1]:
            continue
        block = Block(sequences, queries, keys, masked=masked or spec.padding_mask_bs is not None)
        window = spec.window if spec.window is not None and spec.window < span[1] - span[0] - 1 else None
        if not spec.causal:
            yield dataclasses.replace(block, masked=block.masked or window is not None)
        elif rank == source and window is None and not block.masked:
            yield dataclasses.replace(block, causal=True)
        else:
            yield from _merged(_parts(block, zigzag, rank, source, step=step, window=window))


def _spans(spec: MaskSpec) -> Iterator[tuple[Range | None, Range, bool]]:
    """Yield ranges of the positions of some sequences that attend to no others, and if they are several documents.

    A GPU would have to wait for the lengths of documents.
    """
    if spec.document_ids_bs is None or spec.document_ids_bs.is_cuda:
        yield None, (0, spec.length), spec.document_ids_bs is not None
        return
    for i, lengths in enumerate(document_lengths(spec.document_ids_bs)):
        begin, end, number = 0, 0, 0
        for length in lengths:
            if number and end - begin + length > MERGED_LENGTH:
                yield (i, i + 1), (begin, end), number > 1
                begin, number = end, 0
            end, number = end + length, number + 1
        yield (i, i + 1), (begin, end), number > 1


def _parts(
    block: Block, zigzag: Zigzag, rank: int, source: int, *, step: int, window: int | None
) -> Iterator[Block]:
    """Cut a block of causal attention at each multiple of `step` queries, and leave out keys of no query of a part."""
    (begin, stop), (first_key, _) = block.queries, block.keys
    while begin < stop:
        end = min(begin // step * step + step, stop)
        first, last = (zigzag.positions(rank, row) for row in (begin, end - 1))
        if window is not None:
            first_key = max(first_key, rows_before(zigzag, source, first - window))
        keys = first_key, rows_before(zigzag, source, last + 1)
        masked = block.masked or keys[1] > rows_before(zigzag, source, first + 1)
        if window is not None and keys[0] < keys[1]:
            masked = masked or last - zigzag.positions(source, keys[0]) > window
        yield dataclasses.replace(block, queries=(begin, end), keys=keys, masked=masked)
        begin = end


def _merged(parts: Iterable[Block]) -> Iterator[Block]:
    """Leave out blocks without keys, and join neighbors that all attend to the same ones."""
    last: Block | None = None
    for block in parts:
        if block.keys[0] >= block.keys[1]:
            continue
        if last is not None and last.keys == block.keys and not (last.masked or block.masked):
            last = dataclasses.replace(last, queries=(last.queries[0], block.queries[1]))
            continue
        if last is not None:
            yield last
        last = block
    if last is not None:
        yield last


def rows_before(zigzag: Zigzag, rank: int, position: int) -> int:
    """Number of a rank's rows whose positions are before `position`."""
    chunk = zigzag.chunk
    segment, within = divmod(max(position, 0), 2 * zigzag.size * chunk)
    parts = (min(max(within - place * chunk, 0), chunk) for place in zigzag.places(rank))
    return segment * 2 * chunk + sum(parts)


def pairs_mask(block: Block, spec: MaskSpec, zigzag: Zigzag, rank: int, source: int) -> Tensor | None:
    """[b or 1, 1, s, t], true where a query of `rank` may attend to a key of `source`; None without a mask."""
    if not block.masked:
        return None
    query_s, key_t = _positions(block, spec, zigzag, rank, source)
    distance_st = query_s.unsqueeze(1) - key_t
    mask_bst = (distance_st >= 0 if spec.causal else torch.ones_like(distance_st, dtype=torch.bool))[None]
    if spec.window is not None:
        mask_bst = mask_bst & (distance_st.abs() <= spec.window)
    sequences = slice(None) if block.sequences is None else slice(*block.sequences)
    if spec.document_ids_bs is not None:
        ids_bs = spec.document_ids_bs[sequences]
        mask_bst = mask_bst & (ids_bs[:, query_s].unsqueeze(2) == ids_bs[:, key_t].unsqueeze(1))
    if spec.padding_mask_bs is not None:
        mask_bst = mask_bst & spec.padding_mask_bs[sequences, key_t].bool().unsqueeze(1)
    return mask_bst.unsqueeze(1)


def pairs(block: Block, spec: MaskSpec, zigzag: Zigzag, rank: int, source: int) -> Pairs:
    """The pairs of a block of the queries of `rank` and the keys of `source`, with their positions."""
    query_s, key_t = _positions(block, spec, zigzag, rank, source)
    mask_bnst = pairs_mask(block, spec, zigzag, rank, source)
    return Pairs(query_s=query_s, key_t=key_t, mask_bnst=mask_bnst, causal=block.causal)


def _positions(block: Block, spec: MaskSpec, zigzag: Zigzag, rank: int, source: int) -> tuple[Tensor, Tensor]:
    """Positions of the queries and the keys of a block, int32."""
    query_s, key_t = (
        zigzag.positions(r, torch.arange(*rows, dtype=torch.int32, device=spec.device))
        for r, rows in ((rank, block.queries), (source, block.keys))
    )
    return query_s, key_t
