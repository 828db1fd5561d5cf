"""Attention within documents and windows on a GPU, by blocks of positions instead of a dense mask.

PyTorch's FlexAttention computes the scores of the blocks in which a query attends to a key and skips the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask

from megatron.ops.attention import MaskSpec, attention

BLOCK = 128


def attention_by_documents(
    q_bnsd: Tensor,
    k_bgtd: Tensor,
    v_bgtd: Tensor,
    *,
    mask_bnst: Tensor | BlockMask | None,
    causal: bool,
    dropout: float,
) -> Tensor:
    """`megatron.ops.attention.attention`, where the mask may also be that of `make_block_mask`."""
    if isinstance(mask_bnst, BlockMask) and dropout:  # FlexAttention has none
        mask_bnst = dense_mask(mask_bnst)
    if not isinstance(mask_bnst, BlockMask):
        return attention(q_bnsd, k_bgtd, v_bgtd, mask_bnst=mask_bnst, causal=causal, dropout=dropout)
    out = flex_attention.flex_attention(
        q_bnsd, k_bgtd, v_bgtd, block_mask=mask_bnst, enable_gqa=q_bnsd.shape[1] != k_bgtd.shape[1]
    )
    assert isinstance(out, Tensor)
    return out


def make_block_mask(spec: MaskSpec) -> BlockMask | None:
    """The mask of FlexAttention; None where `causal` says it all."""
    if spec.window is None and spec.document_ids_bs is None:
        return None
    length, window, ids_bs = spec.length, spec.window, spec.document_ids_bs
    blocks = -(-length // BLOCK)
    i = torch.arange(blocks, device=spec.device)
    later = i - i.unsqueeze(1)  # blocks by which the keys are later than the queries
    # A block has a pair that attends, and all of its pairs do.
    attended_bij = full_bij = torch.ones(1, blocks, blocks, dtype=torch.bool, device=spec.device)
    if spec.causal:
        attended_bij, full_bij = attended_bij & (later <= 0), full_bij & (later < 0)
    if window is not None:
        nearest, farthest = (later.abs() - 1) * BLOCK + 1, (later.abs() + 1) * BLOCK - 1
        attended_bij, full_bij = attended_bij & (nearest <= window), full_bij & (farthest <= window)
    if ids_bs is not None:
        padding = ids_bs[:, -1:].expand(len(ids_bs), blocks * BLOCK - length)
        padded = torch.cat((ids_bs, padding), dim=1).view(len(ids_bs), blocks, BLOCK)
        first, last = padded[..., 0], padded[..., -1]
        starts, ends = (first.unsqueeze(1) <= last.unsqueeze(2)), (last.unsqueeze(1) >= first.unsqueeze(2))
        attended_bij = attended_bij & starts & ends
        one = (first == last).unsqueeze(2) & (first == last).unsqueeze(1)
        full_bij = full_bij & one & (first.unsqueeze(2) == first.unsqueeze(1))
    if length % BLOCK:
        full_bij[:, -1], full_bij[:, :, -1] = False, False  # positions beyond the end

    def attends(b: Tensor, n: Tensor, s: Tensor, t: Tensor) -> Tensor:
        allowed = s >= t if spec.causal else s == s
        if window is not None:
            allowed = allowed & ((s - t).abs() <= window)
        return allowed if ids_bs is None else allowed & (ids_bs[b, s] == ids_bs[b, t])

    return BlockMask.from_kv_blocks(
        *_listed(attended_bij & ~full_bij),
        *_listed(full_bij),
        BLOCK_SIZE=BLOCK,
        mask_mod=attends,
        seq_lengths=(length, length),
    )


def dense_mask(mask: BlockMask) -> Tensor:
    """The same mask as a tensor [b, 1, s, t]."""
    s, t = mask.seq_lengths
    device = mask.kv_num_blocks.device
    b_b111 = torch.arange(len(mask.kv_num_blocks), device=device).view(-1, 1, 1, 1)
    s_11s1 = torch.arange(s, device=device).view(1, 1, -1, 1)
    return mask.mask_mod(b_b111, b_b111, s_11s1, torch.arange(t, device=device))


def _listed(mask_bij: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of blocks the number of those in the mask, [b, 1, i], and their indices first, [b, 1, i, j]."""
    indices = mask_bij.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return mask_bij.sum(-1, dtype=torch.int32).unsqueeze(1), indices.to(torch.int32).unsqueeze(1)
