"""The router of a mixture of experts: which experts a token passes, with which weights, and the losses that keep the
experts' load even.

Shapes in names: s sequence (this rank's part of it), b batch, h hidden, e experts, n tokens (s · b), k experts of a
token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.model.context import ModelContext
from megatron.model.moe_config import MoEConfig
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import Axis
from megatron.parallel.parameters import Init, main_grad, master, parameter, zeros
from megatron.parallel.slices import whole

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(nn.Module):
    """Scores of the experts for each token, and the choice of `--moe-router-topk` of them.

    Attributes:
        expert_bias: [e], added to the scores for the choice only. Its gradient is the experts' load, from which its
            optimizer takes the next bias.
        load: [e], tokens of each expert in the last global batch, for the auxiliary loss over it. Its gradient is that
            of this batch.
        record: called in training with sums that plug-ins report, by name: "load" [e] and the "entropy" of the scores
            of this rank's tokens, the tokens' share of "sequences", each auxiliary loss, and "dropped" copies.
    """

    def __init__(self, config: MoEConfig, hidden_size: int, init: Init, context: ModelContext) -> None:
        super().__init__()
        self.config, self.dtype = config, DTYPES[config.moe_router_dtype]
        experts, tp = config.num_experts, context.tp
        assert experts is not None
        # Each tensor-parallel rank routes its own part of the sequence.
        partial = tp.size > 1
        self.weight = parameter(whole(experts, hidden_size, replicas=tp, partial=partial), init)
        vector = whole(experts, replicas=tp, partial=partial)
        self.expert_bias = parameter(vector, zeros) if config.moe_router_enable_expert_bias else None
        has_load = "global_aux_loss" in config.moe_router_load_balancing_type
        self.load = parameter(vector, zeros) if has_load else None
        self.record: Callable[[dict[str, Any]], None] | None = None

    def forward(
        self, x_sbh: Tensor, axis: Axis, sequence_grad: Tensor | float | None
    ) -> tuple[Tensor, Tensor]:
        """Weights and indices of each token's experts, both [n, k]; the weights in the router's precision.

        Args:
            axis: ranks that hold the other parts of each sequence.
            sequence_grad: `LayerInputs.sequence_grad`; with it the gradients of the auxiliary losses are added.
        """
        logits_sbe = self.logits(x_sbh)
        logits_ne = logits_sbe.flatten(0, 1)
        weights_nk, indices_nk = choose_experts(logits_ne, self.config, master(self.expert_bias))
        if sequence_grad is None or not torch.is_grad_enabled():
            return weights_nk, indices_nk
        losses, load_e = auxiliary_losses(logits_sbe, self.config, axis, master(self.load))
        if losses:
            total = torch.stack([factor * loss for factor, loss in losses.values()]).sum() * sequence_grad
            weights_nk = _AddLoss.apply(weights_nk, total)
        with torch.no_grad():
            experts, topk = logits_ne.shape[1], indices_nk.shape[1]
            used_e = count(indices_nk, experts)
            if self.expert_bias is not None and (grad := main_grad(self.expert_bias)) is not None:
                grad += experts * used_e - topk * len(indices_nk)  # above zero if more than the mean
            if self.load is not None and (grad := main_grad(self.load)) is not None:
                grad += load_e
            if self.record is not None:
                shares = logits_ne.softmax(-1)
                entropy = -(shares * shares.clamp(min=1e-30).log()).sum()
                sums = {"load": used_e, "entropy": entropy, "sequences": x_sbh.shape[1] / axis.size}
                self.record(sums | {name: loss.detach() for name, (_, loss) in losses.items()})
        return weights_nk, indices_nk

    def logits(self, x_sbh: Tensor) -> Tensor:
        """[s, b, e] in the router's precision."""
        return _Gate.apply(x_sbh, self.weight, self.dtype)


def best(scores: Tensor, k: int) -> Tensor:
    """Indices of the `k` largest scores along the last dimension, largest first; of equal ones the first."""
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]


def count(indices: Tensor, experts: int) -> Tensor:
    """Number of times that each expert is in `indices`, [e] fp32."""
    indices = indices.flatten()
    zero = indices.new_zeros(experts, dtype=torch.float32)
    return zero.scatter_add_(0, indices, torch.ones_like(indices, dtype=zero.dtype))


def choose_experts(
    logits_ne: Tensor, config: MoEConfig, bias_e: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights and indices of each token's experts, both [n, k] (as NVIDIA's `topk_routing_with_score_function`).

    Args:
        bias_e: added to sigmoid scores for the choice only.
    """
    k, groups, group_topk = config.moe_router_topk, config.moe_router_num_groups, config.moe_router_group_topk
    scores_ne = logits_ne
    if config.moe_router_score_function == "sigmoid":
        scores_ne = logits_ne.sigmoid()
    elif config.moe_router_pre_softmax:
        scores_ne = logits_ne.softmax(dim=-1)
    ranked_ne = scores_ne.detach() if bias_e is None else scores_ne.detach() + bias_e
    if groups is not None and group_topk is not None:
        # Groups by the sum of the scores of as many experts as a token takes from each on average.
        by_group = ranked_ne.view(len(ranked_ne), groups, -1)
        sums = by_group.sort(dim=-1, descending=True).values[..., : k // group_topk].sum(-1)
        allowed = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best(sums, group_topk), True)
        ranked_ne = by_group.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    indices_nk = best(ranked_ne, k)
    weights_nk = scores_ne.gather(1, indices_nk)
    if config.moe_router_score_function == "sigmoid":
        if k > 1:
            weights_nk = weights_nk / (weights_nk.sum(-1, keepdim=True) + 1e-20)
    elif not config.moe_router_pre_softmax:
        weights_nk = weights_nk.softmax(dim=-1)
    return weights_nk * (config.moe_router_topk_scaling_factor or 1.0), indices_nk


def auxiliary_losses(
    logits_sbe: Tensor, config: MoEConfig, axis: Axis, last_load_e: Tensor | None
) -> tuple[dict[str, tuple[float, Tensor]], Tensor]:
    """Auxiliary losses, by name with their coefficients, and the load [e] of this rank's tokens for them.

    A loss is a sum over sequences, of which this is the share of this rank's tokens. That of a sequence is its mean
    over tokens: of logsumexp(logits)² for the z-loss (arXiv 2202.08906 equation 5), and of Σₑ scoreₑ · E fₑ for the
    others (arXiv 2101.03961 equation 4), with the scores' sum 1 and f the experts' shares of the load. The types differ
    in the tokens over which f is taken: "seq_aux_loss" the sequence, "aux_loss" all sequences of the microbatch, and
    "global_aux_loss" the last global batch, since this one's is not known before its end.

    Args:
        axis: ranks that hold the other parts of each sequence.
        last_load_e: tokens of each expert in the last global batch; zeros before the first.
    """
    length = logits_sbe.shape[0] * axis.size
    losses: dict[str, tuple[float, Tensor]] = {}
    if config.moe_z_loss_coeff is not None:
        z = logits_sbe.logsumexp(-1).square().sum() / length
        losses["z_loss"] = config.moe_z_loss_coeff, z
    types = zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=True)
    used = [(name, coefficient) for name, coefficient in types if coefficient > 0]
    if not used:
        return losses, torch.zeros(logits_sbe.shape[-1], device=logits_sbe.device)
    if config.moe_router_score_function == "sigmoid":
        scores_sbe = logits_sbe.sigmoid()
        scores_sbe = scores_sbe / (scores_sbe.sum(-1, keepdim=True) + 1e-20)
    else:
        scores_sbe = logits_sbe.softmax(-1)
    with torch.no_grad():
        chosen = torch.zeros_like(scores_sbe, dtype=torch.float32)
        local_be = chosen.scatter_(-1, best(scores_sbe, config.moe_router_topk), 1.0).sum(0)
        load_be = all_reduce_sum(local_be.clone(), axis)
    for name, coefficient in used:
        load = {"seq_aux_loss": load_be, "aux_loss": load_be.sum(0), "global_aux_loss": last_load_e}[name]
        assert load is not None
        share = load.to(scores_sbe.dtype)
        share = share / share.sum(-1, keepdim=True).clamp(min=1)
        losses[name] = coefficient, (scores_sbe * share).sum() * (scores_sbe.shape[-1] / length)
    return losses, local_be.sum(0)


class _Gate(torch.autograd.Function):
    """x Wᵀ in the router's precision. The gradient of W is accumulated in its `main_grad`, if it has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype, ctx.main_grad = dtype, main_grad(weight)
        ctx.save_for_backward(x, weight)
        return x.to(dtype) @ weight.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = (grad @ weight.to(ctx.dtype)).to(x.dtype) if needs_x else None
        if not needs_weight:
            return grad_x, None, None
        grad_weight = grad.flatten(0, -2).t() @ x.to(ctx.dtype).flatten(0, -2)
        if ctx.main_grad is None:
            return grad_x, grad_weight.to(weight.dtype), None
        ctx.main_grad += grad_weight
        return grad_x, None, None


class _AddLoss(torch.autograd.Function):
    """Identity of `x`; backward differentiates `loss` too, as if it were a part of the model's loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.loss)
