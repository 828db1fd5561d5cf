"""Softmax attention over heads.

Names end in their shape: b batch, n query heads, g key/value heads (groups), s queries, t keys, d head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.compiler import LOG2_E, Run

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
    """`attention` on a CPU in fp32 or bf16, its products by the library that is the fastest at them.

    Blocks of queries meet the keys up to their last one, so that half of the causal square is left out; `run` runs what
    lies between the products. The exponentials are kept for backward, as they are: dividing the few outputs by
    their sum takes less than dividing them.
    """
    s = q_bnsd.shape[2]
    is_plain = mask_bst is None and dropout == 0 and k_bgtd.shape[2] == s
    fits = is_plain and BLOCK <= s <= LONGEST and q_bnsd.numel() > 0
    if not (fits and q_bnsd.dtype in (torch.float32, torch.bfloat16)):
        return attention(q_bnsd, k_bgtd, v_bgtd, mask_bst=mask_bst, causal=causal, dropout=dropout)
    return _Blocks.apply(q_bnsd, k_bgtd, v_bgtd, run, causal)


class _Blocks(torch.autograd.Function):
    """In the names of tensors x is batch times groups, r the heads of a group times the queries of a block.

    Torch's products of bf16 copy what is not dense, and element by element what is transposed too: blocks are cut out
    once, and keys and values before they are transposed.
    """

    @staticmethod
    def forward(ctx, q_bnsd: Tensor, k_bgtd: Tensor, v_bgtd: Tensor, run: Run, causal: bool) -> Tensor:
        b, n, s, d = q_bnsd.shape
        g = k_bgtd.shape[1]
        q_bghsd = q_bnsd.unflatten(1, (g, n // g))
        k, v = (tensor.reshape(b * g, s, d) for tensor in (k_bgtd, v_bgtd))
        out = q_bnsd.new_empty(b * g, n // g, s, d)
        # Added to the scores of the keys that lie along a block. In compiled code comparing positions would take as
        # long as the exponentials do.
        later = torch.full((BLOCK, BLOCK), -math.inf, dtype=k.dtype).triu(1)
        kept = []
        for begin, end in _blocks(s):
            seen = end if causal else s
            q_xrd = q_bghsd[..., begin:end, :].reshape(b * g, -1, d)
            scores_xrt = torch.bmm(q_xrd, k[:, :seen].contiguous().transpose(1, 2))
            if causal:
                along = scores_xrt.unflatten(1, (-1, end - begin))[..., begin:]
                along.add_(later[: end - begin, : end - begin])
            rows = run(_exponentials, scores_xrt.flatten(0, 1), d**-0.5)
            exp_xrt, sum_xr1 = (tensor.unflatten(0, scores_xrt.shape[:2]) for tensor in rows)
            run(_divide, torch.bmm(exp_xrt, v[:, :seen]), sum_xr1, out[:, :, begin:end])
            kept += [q_xrd, exp_xrt, sum_xr1]
        ctx.run, ctx.causal, ctx.groups = run, causal, g
        ctx.save_for_backward(k, v, *kept)
        return out.view(b, n, s, d)

    @staticmethod
    def backward(ctx, grad_bnsd: Tensor) -> tuple[Tensor | None, ...]:
        (k, v, *kept), run, g = ctx.saved_tensors, ctx.run, ctx.groups
        b, n, s, d = grad_bnsd.shape
        grad_bghsd = grad_bnsd.unflatten(1, (g, n // g))
        grad_q = k.new_empty(b * g, n // g, s, d)
        grad_k, grad_v = _Sum(run), _Sum(run)
        # The last block first: it sees all keys.
        for number, (begin, end) in reversed(list(enumerate(_blocks(s)))):
            q_xrd, exp_xrt, sum_xr1 = kept[3 * number : 3 * number + 3]
            seen = end if ctx.causal else s
            # Of the outputs before they were divided.
            grad_xrd = torch.empty_like(q_xrd)
            run(_divide, grad_bghsd[..., begin:end, :].reshape(b * g, -1, d), sum_xr1, grad_xrd)
            grad_exp_xrt = torch.bmm(grad_xrd, v[:, :seen].contiguous().transpose(1, 2))
            grad_scores_xrt = run(_scores_gradient, exp_xrt, grad_exp_xrt, sum_xr1, d**-0.5)
            grad_q[:, :, begin:end] = torch.bmm(grad_scores_xrt, k[:, :seen]).unflatten(1, (n // g, -1))
            grad_k.add(torch.bmm(grad_scores_xrt.transpose(1, 2), q_xrd))
            grad_v.add(torch.bmm(exp_xrt.transpose(1, 2), grad_xrd))
        grad_k, grad_v = (total.value().view(b, g, s, d) for total in (grad_k, grad_v))
        return grad_q.view(b, n, s, d), grad_k, grad_v, None, None


def _blocks(s: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + BLOCK, s)) for begin in range(0, s, BLOCK)]


def _exponentials(scores: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Of [rows, t], exp(scale · (score - the row's largest)) and its sums, [rows, 1] in fp32.

    In two dimensions, compiled code has one loop for all and writes no exponentials in fp32.
    """
    less = scores.float() - scores.amax(-1, keepdim=True).float()
    exp = torch.exp2(less * (scale * LOG2_E))
    return exp.to(scores.dtype), exp.sum(-1, keepdim=True)


def _divide(x_xrd: Tensor, sum_xr1: Tensor, out: Tensor) -> None:
    out.copy_((x_xrd.float() / sum_xr1).view(out.shape))


def _scores_gradient(exp_xrt: Tensor, grad_xrt: Tensor, sum_xr1: Tensor, scale: float) -> Tensor:
    exp, grad = exp_xrt.float(), grad_xrt.float()
    mean = (exp * grad).sum(-1, keepdim=True) / sum_xr1
    return (exp * ((grad - mean) * scale)).to(exp_xrt.dtype)


class _Sum:
    """A sum in fp32 of tensors [x, t, d] of the first t keys, the first of which is of all keys."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.first_xsd: Tensor | None = None
        self.total_xtd: Tensor | None = None

    def add(self, part_xtd: Tensor) -> None:
        t = part_xtd.shape[1]
        if self.first_xsd is None:
            self.first_xsd = part_xtd
            self.total_xtd = part_xtd if part_xtd.dtype == torch.float32 else None
        elif self.total_xtd is None:
            self.total_xtd = torch.empty_like(part_xtd, dtype=torch.float32)
            self.run(_add, self.total_xtd, self.first_xsd[:, :t], part_xtd)
        else:
            self.run(_add, self.total_xtd[:, :t], self.total_xtd[:, :t], part_xtd)

    def value(self) -> Tensor:
        """[x, s, d], of the dtype of the parts."""
        if self.total_xtd is not None and self.total_xtd is not self.first_xsd:
            self.first_xsd[:, : self.total_xtd.shape[1]] = self.total_xtd
        return self.first_xsd


def _add(total: Tensor, a: Tensor, b: Tensor) -> None:
    total.copy_(a.float() + b.float())


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, s, t], true where the query, one of the last `queries` of `keys` positions, may see the key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries).unsqueeze(0)


def document_mask(document_ids_bs: Tensor) -> Tensor:
    """[b, s, s], true where query and key belong to one document and the key does not come later."""
    same = document_ids_bs.unsqueeze(2) == document_ids_bs.unsqueeze(1)
    return same & causal_mask(same.shape[1], same.shape[1], same.device)
