"""Attention within documents on a GPU, by blocks of positions instead of a dense mask.

PyTorch's FlexAttention computes the scores of the blocks that a document's positions attend to and skips the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask

from megatron.ops.attention import attention

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
    """`megatron.ops.attention.attention`, where the mask may also be that of `document_blocks`."""
    if isinstance(mask_bnst, BlockMask) and dropout:  # FlexAttention has none
        mask_bnst = dense_mask(mask_bnst)
    if not isinstance(mask_bnst, BlockMask):
        return attention(q_bnsd, k_bgtd, v_bgtd, mask_bnst=mask_bnst, causal=causal, dropout=dropout)
    out = flex_attention.flex_attention(
        q_bnsd, k_bgtd, v_bgtd, block_mask=mask_bnst, enable_gqa=q_bnsd.shape[1] != k_bgtd.shape[1]
    )
    assert isinstance(out, Tensor)
    return out


def document_blocks(document_ids_bs: Tensor) -> BlockMask:
    """Mask of FlexAttention: a query attends to the positions of its own document that are not later.

    Args:
        document_ids_bs: ids that do not decrease along s.
    """
    batch, length = document_ids_bs.shape
    blocks = -(-length // BLOCK)
    padding = document_ids_bs[:, -1:].expand(batch, blocks * BLOCK - length)
    padded = torch.cat((document_ids_bs, padding), dim=1).view(batch, blocks, BLOCK)
    first, last = padded[..., 0], padded[..., -1]
    lower = torch.ones(blocks, blocks, dtype=torch.bool, device=first.device).tril()
    # A block of keys ends in the first document of the queries or later.
    attended = lower & (last.unsqueeze(1) >= first.unsqueeze(2))
    # All keys are earlier, and of the one document of the queries.
    full = lower.tril(-1) & (first.unsqueeze(1) == last.unsqueeze(2))
    if length % BLOCK:
        full[:, -1] = False  # has queries beyond the end

    def same_document(b: Tensor, n: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return (document_ids_bs[b, s] == document_ids_bs[b, t]) & (s >= t)

    return BlockMask.from_kv_blocks(
        *_listed(attended & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=same_document,
        seq_lengths=(length, length),
    )


def dense_mask(mask: BlockMask) -> Tensor:
    """The same mask as a tensor [b, 1, s, t]."""
    s, t = mask.seq_lengths
    device = mask.kv_num_blocks.device
    b_b111 = torch.arange(len(mask.kv_num_blocks), device=device).view(-1, 1, 1, 1)
    s_1 = torch.arange(s, device=device).view(-1, 1)
    return mask.mask_mod(b_b111, b_b111, s_1, torch.arange(t, device=device))


def _listed(mask_bij: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of blocks the number of those in the mask, [b, 1, i], and their indices first, [b, 1, i, j]."""
    indices = mask_bij.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return mask_bij.sum(-1, dtype=torch.int32).unsqueeze(1), indices.to(torch.int32).unsqueeze(1)
