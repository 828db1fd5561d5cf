"""Attention by blocks of queries, with matrix products by the CPU's fastest library.

Shapes in names: b batch, n query heads, g key/value heads (groups), s queries, t keys, d head width, w width of
values; x batch times groups, r heads of a group times queries of a block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.attention import attention
from megatron.ops.compiler import LOG2_E, CompileFn

# Queries in a block.
BLOCK = 128
# Longest sequence for which it pays to keep the blocks for backward (benchmarks/README.md).
MAX_LENGTH = 1024


def padded_attention(
    q_bnsd: Tensor, k_bgtd: Tensor, v_bgtd: Tensor, *, mask_bnst: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """`attention` with narrower values padded to d, since torch's kernel for CPUs takes no other width."""
    missing = q_bnsd.shape[-1] - v_bgtd.shape[-1]
    if missing > 0:
        v_bgtd = F.pad(v_bgtd, (0, missing))
    out = attention(q_bnsd, k_bgtd, v_bgtd, mask_bnst=mask_bnst, causal=causal, dropout=dropout)
    return out[..., :-missing] if missing > 0 else out


def attention_by_blocks(
    run: CompileFn,
    q_bnsd: Tensor,
    k_bgtd: Tensor,
    v_bgtd: Tensor,
    *,
    mask_bnst: Tensor | None,
    causal: bool,
    dropout: float,
) -> Tensor:
    """`attention` in fp32 or bf16.

    Each block of queries meets the keys up to its last query, which leaves out half of the causal square. `run` calls
    the functions between the products. Backward keeps the exponentials undivided: it is cheaper to divide the outputs
    by the sum, which are fewer.
    """
    s = q_bnsd.shape[2]
    plain = mask_bnst is None and dropout == 0 and k_bgtd.shape[2] == s
    supported = plain and BLOCK <= s <= MAX_LENGTH and q_bnsd.numel() > 0
    if not (supported and q_bnsd.dtype in (torch.float32, torch.bfloat16)):
        return padded_attention(q_bnsd, k_bgtd, v_bgtd, mask_bnst=mask_bnst, causal=causal, dropout=dropout)
    return _Blocks.apply(q_bnsd, k_bgtd, v_bgtd, run, causal)


class _Blocks(torch.autograd.Function):
    """Blocks are copied out once, and keys and values before they are transposed: torch's bf16 product copies operands
    that are not dense, and transposed ones element by element."""

    @staticmethod
    def forward(
        ctx: Any, q_bnsd: Tensor, k_bgtd: Tensor, v_bgtd: Tensor, run: CompileFn, causal: bool
    ) -> Tensor:
        b, n, s, d = q_bnsd.shape
        g = k_bgtd.shape[1]
        q_bghsd = q_bnsd.unflatten(1, (g, n // g))
        k, v = (tensor.reshape(b * g, s, -1) for tensor in (k_bgtd, v_bgtd))
        out = q_bnsd.new_empty(b * g, n // g, s, v.shape[-1])
        # Added to the scores on the diagonal. Comparing positions in compiled code would take as long as the
        # exponentials do.
        later = torch.full((BLOCK, BLOCK), -math.inf, dtype=k.dtype).triu(1)
        kept = []
        for begin, end in _blocks(s):
            keys = end if causal else s
            q_xrd = q_bghsd[..., begin:end, :].reshape(b * g, -1, d)
            scores_xrt = torch.bmm(q_xrd, k[:, :keys].contiguous().transpose(1, 2))
            if causal:
                diagonal = scores_xrt.unflatten(1, (-1, end - begin))[..., begin:]
                diagonal.add_(later[: end - begin, : end - begin])
            rows = run(_exponentials, scores_xrt.flatten(0, 1), d**-0.5)
            exp_xrt, sum_xr1 = (tensor.unflatten(0, scores_xrt.shape[:2]) for tensor in rows)
            run(_divide, torch.bmm(exp_xrt, v[:, :keys]), sum_xr1, out[:, :, begin:end])
            kept += [q_xrd, exp_xrt, sum_xr1]
        ctx.run, ctx.causal, ctx.groups = run, causal, g
        ctx.save_for_backward(k, v, *kept)
        return out.view(b, n, s, -1)

    @staticmethod
    def backward(ctx: Any, grad_bnsd: Tensor) -> tuple[Tensor | None, ...]:
        (k, v, *kept), run, g = ctx.saved_tensors, ctx.run, ctx.groups
        b, n, s, w = grad_bnsd.shape
        d = k.shape[-1]
        grad_bghsd = grad_bnsd.unflatten(1, (g, n // g))
        grad_q = k.new_empty(b * g, n // g, s, d)
        grad_k, grad_v = _PrefixSum(run), _PrefixSum(run)
        # The last block first, since it sees all keys.
        for number, (begin, end) in reversed(list(enumerate(_blocks(s)))):
            q_xrd, exp_xrt, sum_xr1 = kept[3 * number : 3 * number + 3]
            keys = end if ctx.causal else s
            # Gradient of the undivided outputs.
            grad_xrd = q_xrd.new_empty(*q_xrd.shape[:2], w)
            run(_divide, grad_bghsd[..., begin:end, :].reshape(b * g, -1, w), sum_xr1, grad_xrd)
            grad_exp_xrt = torch.bmm(grad_xrd, v[:, :keys].contiguous().transpose(1, 2))
            grad_scores_xrt = run(_scores_backward, exp_xrt, grad_exp_xrt, sum_xr1, d**-0.5)
            grad_q[:, :, begin:end] = torch.bmm(grad_scores_xrt, k[:, :keys]).unflatten(1, (n // g, -1))
            grad_k.add(torch.bmm(grad_scores_xrt.transpose(1, 2), q_xrd))
            grad_v.add(torch.bmm(exp_xrt.transpose(1, 2), grad_xrd))
        grad_k_bgsd, grad_v_bgsd = (total.value().view(b, g, s, -1) for total in (grad_k, grad_v))
        return grad_q.view(b, n, s, d), grad_k_bgsd, grad_v_bgsd, None, None


def _blocks(s: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + BLOCK, s)) for begin in range(0, s, BLOCK)]


def _exponentials(scores: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """exp(scale · (score - row maximum)) of [rows, t], and the sum of each row in fp32, [rows, 1].

    With two dimensions, compiled code has one loop for everything and writes no exponentials in fp32.
    """
    less = scores.float() - scores.amax(-1, keepdim=True).float()
    exp = torch.exp2(less * (scale * LOG2_E))
    return exp.to(scores.dtype), exp.sum(-1, keepdim=True)


def _divide(x_xrd: Tensor, sum_xr1: Tensor, out: Tensor) -> None:
    out.copy_((x_xrd.float() / sum_xr1).view(out.shape))


def _scores_backward(exp_xrt: Tensor, grad_xrt: Tensor, sum_xr1: Tensor, scale: float) -> Tensor:
    exp, grad = exp_xrt.float(), grad_xrt.float()
    mean = (exp * grad).sum(-1, keepdim=True) / sum_xr1
    return (exp * ((grad - mean) * scale)).to(exp_xrt.dtype)


class _PrefixSum:
    """Sum in fp32 of tensors [x, t, d] over the first t of s keys. The first tensor covers all keys."""

    def __init__(self, run: CompileFn) -> None:
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
        """The sum, [x, s, d], in the dtype of its terms."""
        assert self.first_xsd is not None
        if self.total_xtd is not None and self.total_xtd is not self.first_xsd:
            self.first_xsd[:, : self.total_xtd.shape[1]] = self.total_xtd
        return self.first_xsd


def _add(total: Tensor, a: Tensor, b: Tensor) -> None:
    total.copy_(a.float() + b.float())
