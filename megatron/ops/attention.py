"""Softmax attention over heads.

Names end in their shape: b batch, n query heads, g key/value heads (groups), s queries, t keys, d head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.compiler import Run

# Queries of a block, and the longest sequence whose blocks are worth keeping for backward (benchmarks/README.md).
BLOCK, LONGEST = 128, 1024


def attention(
    q_bnsd: Tensor, k_bgtd: Tensor, v_bgtd: Tensor, *, mask_bst: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """softmax(q kᵀ / √d) v, each query head reading the key and value head of its group.

    Args:
        mask_bst: true where a query may attend to a key; None means everywhere, or with `causal` to no later one, which
            needs s = t. The fastest back ends take no mask.
        dropout: probability of dropping an attention weight.

    Returns:
        [b, n, s, d]
    """
    return F.scaled_dot_product_attention(
        q_bnsd,
        k_bgtd,
        v_bgtd,
        attn_mask=None if mask_bst is None else mask_bst.unsqueeze(1),
        dropout_p=dropout,
        is_causal=causal and mask_bst is None,
        enable_gqa=q_bnsd.shape[1] != k_bgtd.shape[1],
    )


def attention_by_blocks(
    run: Run,
    q_bnsd: Tensor,
    k_bgtd: Tensor,
    v_bgtd: Tensor,
    *,
    mask_bst: Tensor | None,
    causal: bool,
    dropout: float,
) -> Tensor:
    """`attention` on a CPU in bf16, of which matrix units compute the products.

    Blocks of queries meet the keys up to their last one, so that half of the causal square is left out; `run` runs what
    lies between the products. The exponentials are kept for backward, as they are: dividing the few outputs by
    their sum takes less than dividing them.
    """
    s = q_bnsd.shape[2]
    fits = mask_bst is None and dropout == 0 and k_bgtd.shape[2] == s and BLOCK <= s <= LONGEST
    if not (fits and q_bnsd.dtype == torch.bfloat16):
        return attention(q_bnsd, k_bgtd, v_bgtd, mask_bst=mask_bst, causal=causal, dropout=dropout)
    return _Blocks.apply(q_bnsd, k_bgtd, v_bgtd, run, causal)


class _Blocks(torch.autograd.Function):
    """In the names of tensors x is batch times groups, r the heads of a group times the queries of a block."""

    @staticmethod
    def forward(ctx, q_bnsd: Tensor, k_bgtd: Tensor, v_bgtd: Tensor, run: Run, causal: bool) -> Tensor:
        b, n, s, d = q_bnsd.shape
        g = k_bgtd.shape[1]
        # [x, heads of a group, s, d] and [x, t, d]
        q, k, v = (
            q_bnsd.reshape(b * g, n // g, s, d),
            k_bgtd.reshape(b * g, s, d),
            v_bgtd.reshape(b * g, s, d),
        )
        out = torch.empty_like(q)
        sums, kept = [], []
        for begin, end in _blocks(s):
            seen = end if causal else s
            scores_xrt = torch.bmm(q[:, :, begin:end].flatten(1, 2), k[:, :seen].transpose(1, 2))
            exp_xrt, sum_xr1 = run(_exponentials, scores_xrt, d**-0.5, end - begin if causal else 0)
            out_xrd = torch.bmm(exp_xrt, v[:, :seen])
            run(_divide, out_xrd, sum_xr1, out[:, :, begin:end])
            kept.append(exp_xrt)
            sums.append(sum_xr1.view(b * g, n // g, end - begin, 1))
        ctx.run, ctx.causal, ctx.shape = run, causal, k_bgtd.shape
        ctx.save_for_backward(q, k, v, torch.cat(sums, dim=2), *kept)
        return out.view(b, n, s, d)

    @staticmethod
    def backward(ctx, grad_bnsd: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, sums, *kept), run = ctx.saved_tensors, ctx.run
        s, d = q.shape[2:]
        # Of the outputs before they were divided.
        grad = torch.empty_like(q)
        run(_divide, grad_bnsd.reshape(q.shape), sums, grad)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros(2, *k.shape)
        for (begin, end), exp_xrt in zip(_blocks(s), kept, strict=True):
            seen = end if ctx.causal else s
            grad_xrd, sum_xr1 = (x[:, :, begin:end].flatten(1, 2) for x in (grad, sums))
            grad_exp_xrt = torch.bmm(grad_xrd, v[:, :seen].transpose(1, 2))
            grad_scores_xrt = run(_scores_gradient, exp_xrt, grad_exp_xrt, sum_xr1, d**-0.5)
            grad_q[:, :, begin:end] = torch.bmm(grad_scores_xrt, k[:, :seen]).view(
                grad_q[:, :, begin:end].shape
            )
            q_xrd = q[:, :, begin:end].flatten(1, 2)
            run(_add_to, grad_k[:, :seen], torch.bmm(grad_scores_xrt.transpose(1, 2), q_xrd))
            run(_add_to, grad_v[:, :seen], torch.bmm(exp_xrt.transpose(1, 2), grad_xrd))
        shape = grad_bnsd.shape
        return grad_q.view(shape), *(x.to(q.dtype).view(ctx.shape) for x in (grad_k, grad_v)), None, None


def _blocks(s: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + BLOCK, s)) for begin in range(0, s, BLOCK)]


def _exponentials(scores_xrt: Tensor, scale: float, queries: int) -> tuple[Tensor, Tensor]:
    """exp(scale · (score - the row's largest)) and its sums, [x, r, 1] in fp32.

    If `queries` is not 0 they are the last so many positions, and see none after their own.
    """
    x = scores_xrt.float() * scale
    if queries:
        rows, keys = scores_xrt.shape[1:]
        position = torch.arange(rows).remainder(queries) + (keys - queries)
        x = torch.where(torch.arange(keys) <= position.unsqueeze(1), x, -math.inf)
    exp = (x - x.amax(-1, keepdim=True)).exp()
    return exp.to(scores_xrt.dtype), exp.sum(-1, keepdim=True)


def _divide(x_xrd: Tensor, sum_xr1: Tensor, out: Tensor) -> None:
    out.copy_((x_xrd.float() / sum_xr1).view(out.shape))


def _scores_gradient(exp_xrt: Tensor, grad_xrt: Tensor, sum_xr1: Tensor, scale: float) -> Tensor:
    exp, grad = exp_xrt.float(), grad_xrt.float()
    mean = (exp * grad).sum(-1, keepdim=True) / sum_xr1
    return (exp * ((grad - mean) * scale)).to(exp_xrt.dtype)


def _add_to(total: Tensor, x: Tensor) -> None:
    total.add_(x)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, s, t], true where the query, one of the last `queries` of `keys` positions, may see the key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries).unsqueeze(0)


def document_mask(document_ids_bs: Tensor) -> Tensor:
    """[b, s, s], true where query and key belong to one document and the key does not come later."""
    same = document_ids_bs.unsqueeze(2) == document_ids_bs.unsqueeze(1)
    return same & causal_mask(same.shape[1], same.shape[1], same.device)
