"""Softmax attention over heads, and its masks.

Shapes in names: b batch, n query heads, g key/value heads (groups), s queries, t keys, d head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    q_bnsd: Tensor, k_bgtd: Tensor, v_bgtd: Tensor, *, mask_bnst: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """softmax(q kᵀ / √d) v, where each query head reads the key and value head of its group.

    Args:
        mask_bnst: true where a query may attend to a key, or a bias of the scores; b and n may be 1. None means
            everywhere or, with `causal`, to no later key, which requires s = t. The fastest kernels take no mask.
        dropout: probability of dropping an attention weight.

    Returns:
        [b, n, s, d]
    """
    return F.scaled_dot_product_attention(
        q_bnsd,
        k_bgtd,
        v_bgtd,
        attn_mask=mask_bnst,
        dropout_p=dropout,
        is_causal=causal and mask_bnst is None,
        enable_gqa=q_bnsd.shape[1] != k_bgtd.shape[1],
    )


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, s, t], true where a query, one of the last `queries` of `keys` positions, may attend to the key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries).unsqueeze(0)


def document_mask(document_ids_bs: Tensor) -> Tensor:
    """[b, s, s], true where query and key belong to the same document and the key is not later."""
    same = document_ids_bs.unsqueeze(2) == document_ids_bs.unsqueeze(1)
    return same & causal_mask(same.shape[1], same.shape[1], same.device)
