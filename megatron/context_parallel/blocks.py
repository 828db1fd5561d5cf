"""The blocks of scores of two ranks' positions in a divided sequence (`megatron/data/zigzag.py`).

Shapes in names: b batch, n heads, s queries, t keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.data.zigzag import zigzag_ranges
from megatron.ops.attention import MaskSpec
from megatron.ops.scored_attention import Pairs
from megatron.parallel.mesh import Axis

Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Block:
    """Queries and keys of which some pairs attend.

    Attributes:
        queries, keys: ranges of the local positions.
        causal: the two have the same positions, and later keys are left out.
        mask_bnst: of the pairs that attend; None where all do, or all but later keys.
    """

    queries: Range
    keys: Range
    causal: bool = False
    mask_bnst: Tensor | None = None


def blocks(spec: MaskSpec, rank: int, source: int, size: int) -> Iterator[Block]:
    """The blocks of the queries of `rank` and the keys of `source`, two of `size` ranks; those that no mask allows are
    left out.

    Causal attention without other masks is the same work for every pair of ranks: half of all pairs of positions.
    """
    half = spec.length // (2 * size)
    if spec.window is None and spec.document_ids_bs is None and spec.padding_mask_bs is None:
        both, first, second = (0, 2 * half), (0, half), (half, 2 * half)
        if not spec.causal or rank == source:
            yield Block(both, both, causal=spec.causal)
        elif source < rank:
            yield Block(both, first)
        else:
            yield Block(second, both)
        return
    for i, queries in enumerate(zigzag_ranges(spec.length, rank, size)):
        for j, keys in enumerate(zigzag_ranges(spec.length, source, size)):
            if spec.causal and keys[0] > queries[0]:
                continue
            mask = pairs_mask(spec, queries, keys)
            # A GPU would have to wait for the answer.
            if mask.is_cuda or mask.any():
                yield Block((i * half, (i + 1) * half), (j * half, (j + 1) * half), mask_bnst=mask)


def pairs_mask(spec: MaskSpec, queries: Range, keys: Range) -> Tensor:
    """[b or 1, 1, s, t], true where a query of a range of positions may attend to a key of another."""
    position_s1 = torch.arange(*queries, device=spec.device).unsqueeze(1)
    position_t = torch.arange(*keys, device=spec.device)
    mask_bst = (position_s1 >= position_t if spec.causal else position_s1 >= 0).unsqueeze(0)
    if spec.window is not None:
        mask_bst = mask_bst & ((position_s1 - position_t).abs() <= spec.window)
    if (ids_bs := spec.document_ids_bs) is not None:
        mask_bst = mask_bst & (
            ids_bs[:, slice(*queries)].unsqueeze(2) == ids_bs[:, slice(*keys)].unsqueeze(1)
        )
    if spec.padding_mask_bs is not None:
        mask_bst = mask_bst & spec.padding_mask_bs.bool()[:, None, slice(*keys)]
    return mask_bst.unsqueeze(1)


def pairs(block: Block, spec: MaskSpec, ring: Axis, source: int) -> Pairs:
    """The pairs of a block of this rank's queries and the keys of `source`, with their positions."""
    query_s, key_t = (
        torch.cat(
            [
                torch.arange(*part, dtype=torch.int32, device=spec.device)
                for part in zigzag_ranges(spec.length, rank, ring.size)
            ]
        )[slice(*local)]
        for rank, local in ((ring.rank, block.queries), (source, block.keys))
    )
    return Pairs(query_s=query_s, key_t=key_t, mask_bnst=block.mask_bnst, causal=block.causal)
