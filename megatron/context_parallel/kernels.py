"""Attention over a part of the keys, with the logarithm of the sum of exponentials that joins the parts.

softmax(q kᵀ / √d) v over all keys is the mean of the parts' outputs, weighted by exp(lse). Given the output and the lse
over all keys, backward of a part is that of attention over its keys alone (arXiv 2307.08691 section 3.1).

Shapes in names: b batch, n query heads, g key/value heads (groups), s queries, t keys, d head width, w width of values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def partial_attention(
    q_bnsd: Tensor, k_bgtd: Tensor, v_bgtw: Tensor, mask_bnst: Tensor | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [b, n, s, w] and lse [b, n, s] of attention over these keys.

    A query that may attend to none of them has the output 0 and the lse -inf.

    Args:
        mask_bnst: true where a query may attend to a key; b and n may be 1. None means everywhere or, with `causal`, to
            no later key, with s = t.
    """
    width = v_bgtw.shape[-1]
    if _takes_cpu_flash(q_bnsd, v_bgtw):
        out_bnsd, lse_bns = aten._scaled_dot_product_flash_attention_for_cpu(
            q_bnsd,
            k_bgtd,
            _padded(v_bgtw, q_bnsd),
            is_causal=causal and mask_bnst is None,
            attn_mask=_bias(mask_bnst, q_bnsd),
        )
        if mask_bnst is not None:
            lse_bns = lse_bns.masked_fill(~mask_bnst.any(-1), -torch.inf)
        return out_bnsd[..., :width], lse_bns
    if _takes_flash(q_bnsd, v_bgtw, mask_bnst):
        tensors = q_bnsd, k_bgtd, _padded(v_bgtw, q_bnsd)
        out_bnsd, lse_bns, *_ = aten._scaled_dot_product_flash_attention(*tensors, 0.0, causal)
        return out_bnsd[..., :width], lse_bns
    return plain_partial_attention(q_bnsd, k_bgtd, v_bgtw, mask_bnst, causal=causal)


def partial_attention_backward(
    grad_bnsw: Tensor,
    q_bnsd: Tensor,
    k_bgtd: Tensor,
    v_bgtw: Tensor,
    out_bnsw: Tensor,
    lse_bns: Tensor,
    mask_bnst: Tensor | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, keys and values from the gradient, the output and the lse over all keys."""
    width = v_bgtw.shape[-1]
    if _takes_cpu_flash(q_bnsd, v_bgtw):
        grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _padded(grad_bnsw, q_bnsd),
            q_bnsd,
            k_bgtd,
            _padded(v_bgtw, q_bnsd),
            _padded(out_bnsw, q_bnsd),
            lse_bns,
            0.0,
            causal and mask_bnst is None,
            attn_mask=_bias(mask_bnst, q_bnsd),
        )
        return grad_q, grad_k, grad_v[..., :width]
    if _takes_flash(q_bnsd, v_bgtw, mask_bnst):
        grad, v, out = (_padded(x, q_bnsd) for x in (grad_bnsw, v_bgtw, out_bnsw))
        lse = lse_bns.contiguous()  # a part of the queries has other strides, and the kernel reads none
        lengths = None, None, q_bnsd.shape[2], k_bgtd.shape[2]
        unused = q_bnsd.new_zeros(2, dtype=torch.int64)  # the state of dropout
        grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_backward(
            grad, q_bnsd, k_bgtd, v, out, lse, *lengths, 0.0, causal, unused, unused
        )
        return grad_q, grad_k, grad_v[..., :width]
    return plain_partial_attention_backward(
        grad_bnsw, q_bnsd, k_bgtd, v_bgtw, out_bnsw, lse_bns, mask_bnst, causal=causal
    )


def plain_partial_attention(
    q_bnsd: Tensor, k_bgtd: Tensor, v_bgtw: Tensor, mask_bnst: Tensor | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """`partial_attention` as formulas."""
    scores, (_, _, v_bg1tw) = _scores(q_bnsd, k_bgtd, v_bgtw, mask_bnst, causal)
    lse_bghs = scores.logsumexp(-1)
    # An empty row has the lse -inf, and exp(-inf - -inf) is not a number.
    weights = (scores - lse_bghs.clamp(min=torch.finfo(scores.dtype).min).unsqueeze(-1)).exp()
    return (weights @ v_bg1tw).flatten(1, 2).to(q_bnsd.dtype), lse_bghs.flatten(1, 2)


def plain_partial_attention_backward(
    grad_bnsw: Tensor,
    q_bnsd: Tensor,
    k_bgtd: Tensor,
    v_bgtw: Tensor,
    out_bnsw: Tensor,
    lse_bns: Tensor,
    mask_bnst: Tensor | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`partial_attention_backward` as formulas."""
    scores, (q, k, v) = _scores(q_bnsd, k_bgtd, v_bgtw, mask_bnst, causal)
    heads = (k_bgtd.shape[1], -1)
    grad, out, lse = (x.to(scores.dtype).unflatten(1, heads) for x in (grad_bnsw, out_bnsw, lse_bns))
    weights = (scores - lse.unsqueeze(-1)).exp()
    mean = (grad * out).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ v.transpose(-1, -2) - mean) * q.shape[-1] ** -0.5
    grad_q = (grad_scores @ k).flatten(1, 2)
    grad_k = (grad_scores.transpose(-1, -2) @ q).sum(2)
    grad_v = (weights.transpose(-1, -2) @ grad).sum(2)
    return grad_q.to(q_bnsd.dtype), grad_k.to(k_bgtd.dtype), grad_v.to(v_bgtw.dtype)


def _scores(
    q_bnsd: Tensor, k_bgtd: Tensor, v_bgtw: Tensor, mask_bnst: Tensor | None, causal: bool
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Scores in fp32 (fp64 of fp64) by group and head, [b, g, n / g, s, t], and the inputs in this form."""
    dtype = torch.promote_types(q_bnsd.dtype, torch.float32)
    q = q_bnsd.to(dtype).unflatten(1, (k_bgtd.shape[1], -1))
    k, v = k_bgtd.to(dtype).unsqueeze(2), v_bgtw.to(dtype).unsqueeze(2)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask_bnst is not None:
        scores = scores.masked_fill(~mask_bnst.unsqueeze(2), -torch.inf)
    elif causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores, (q, k, v)


def _takes_flash(q_bnsd: Tensor, v_bgtw: Tensor, mask_bnst: Tensor | None) -> bool:
    """True if FlashAttention computes this on a GPU: 16 bits and no mask, from Ampere on.

    Widths are multiples of 8, since it loads 16 bytes at once, up to 256; values are padded to the width of keys.
    """
    d, w = q_bnsd.shape[-1], v_bgtw.shape[-1]
    if mask_bnst is not None or q_bnsd.dtype not in (torch.float16, torch.bfloat16):
        return False
    if not (w <= d <= 256 and d % 8 == w % 8 == 0):
        return False
    capability = torch.cuda.get_device_capability(q_bnsd.device)
    # Backward of these widths needs more shared memory than these GPUs have.
    has_no_backward = 192 < d <= 224 and ((8, 6) <= capability <= (8, 9) or capability >= (12, 0))
    return capability >= (8, 0) and not has_no_backward


def _takes_cpu_flash(q_bnsd: Tensor, v_bgtw: Tensor) -> bool:
    """True if torch's CPU kernel computes this: values no wider than keys, to whose width they are padded."""
    return not q_bnsd.is_cuda and v_bgtw.shape[-1] <= q_bnsd.shape[-1]


def _padded(x: Tensor, q_bnsd: Tensor) -> Tensor:
    """Values, or what has their width, padded to that of the queries: torch's kernels take no other."""
    return F.pad(x, (0, q_bnsd.shape[-1] - x.shape[-1])) if x.shape[-1] < q_bnsd.shape[-1] else x


def _bias(mask_bnst: Tensor | None, q_bnsd: Tensor) -> Any:
    """The mask as a bias of the scores, for torch's CPU kernel."""
    if mask_bnst is None:
        return None
    zero = torch.zeros((), dtype=q_bnsd.dtype, device=q_bnsd.device)
    return torch.where(mask_bnst, zero, -torch.inf)
