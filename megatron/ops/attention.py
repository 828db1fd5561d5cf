"""Softmax attention over heads, and its masks.

Shapes in names: b batch, n query heads, g key/value heads (groups), s queries, t keys, d head width.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def attention(
    q_bnsd: Tensor, k_bgtd: Tensor, v_bgtd: Tensor, *, mask_bnst: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """softmax(q kᵀ / √d) v, where each query head reads the key and value head of its group.

    Args:
        mask_bnst: true where a query may attend to a key, or a bias of the scores; b and n may be 1. None means
            everywhere or, with `causal`, to no later key, which requires s = t. The fastest kernels take no mask.
        dropout: probability of dropping an attention weight.

    Returns:
        [b, n, s, d], or with the width of the values if that is another
    """
    queries_per_group = q_bnsd.shape[1] // k_bgtd.shape[1]
    takes_groups = mask_bnst is None and q_bnsd.dtype != torch.float32
    if q_bnsd.is_cuda and queries_per_group > 1 and not takes_groups:
        # Otherwise all scores would be written to memory.
        k_bgtd, v_bgtd = (x.repeat_interleave(queries_per_group, dim=1) for x in (k_bgtd, v_bgtd))
    with kernels(q_bnsd.device):
        return F.scaled_dot_product_attention(
            q_bnsd,
            k_bgtd,
            v_bgtd,
            attn_mask=mask_bnst,
            dropout_p=dropout,
            is_causal=causal and mask_bnst is None,
            enable_gqa=q_bnsd.shape[1] != k_bgtd.shape[1],
        )


def kernels(device: torch.device) -> AbstractContextManager[object]:
    """Kernels that attention may use on a GPU, in order of preference; the first that takes the inputs computes them.

    Like torch, prefers cuDNN's from Hopper on. Generation leaves them out: they keep a plan for each shape, and the
    shape changes with every token. Training without gradients does not, so that recomputation drops the same weights.
    """
    if device.type != "cuda":
        return nullcontext()
    # Generation is never compiled, and compiled code cannot ask for the mode.
    generates = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    cudnn = not generates and torch.cuda.get_device_properties(device).major >= 9
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *order] if cudnn else order, set_priority=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """The keys of its sequence that a query may attend to: those of which everything given here is true.

    Attributes:
        length: positions of a whole sequence.
        causal: the key is not later than the query.
        window: the key is at most this many positions earlier than the query, and if not `causal` as many later.
        document_ids_bs: the key is in the query's document. Ids do not decrease along s. With context parallelism
            those of this rank's positions.
        padding_mask_bs: with context parallelism, of this rank's positions: 0 for keys that nothing attends to.
        slopes_n: no mask, but with context parallelism the bias of each head for a step back (ALiBi).
        device: that of the queries.
    """

    length: int
    causal: bool = True
    window: int | None = None
    document_ids_bs: Tensor | None = None
    padding_mask_bs: Tensor | None = None
    slopes_n: Tensor | None = None
    device: torch.device


def make_mask(spec: MaskSpec) -> Tensor | None:
    """[b or 1, 1, s, s], true where the query may attend to the key; None where `causal` says it all."""
    if spec.window is None and spec.document_ids_bs is None:
        return None
    mask_bst = torch.ones(1, 1, 1, dtype=torch.bool, device=spec.device)
    if spec.causal:
        mask_bst = causal_mask(spec.length, spec.length, spec.device)
    if spec.window is not None:
        position_s = torch.arange(spec.length, device=spec.device)
        mask_bst = mask_bst & ((position_s.unsqueeze(1) - position_s).abs() <= spec.window)
    if (ids_bs := spec.document_ids_bs) is not None:
        mask_bst = mask_bst & (ids_bs.unsqueeze(2) == ids_bs.unsqueeze(1))
    return mask_bst.unsqueeze(1)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, s, t], true where a query, one of the last `queries` of `keys` positions, may attend to the key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries).unsqueeze(0)
