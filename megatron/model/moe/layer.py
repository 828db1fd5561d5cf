"""A mixture of experts in place of a layer's MLP (arXiv 2101.03961, 2401.06066)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.data.zigzag import Zigzag
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.mlp import MLP, input_init
from megatron.model.moe.dispatch import by_all_gather, by_all_to_all
from megatron.model.moe.experts import Experts
from megatron.model.moe.router import Router
from megatron.model.moe_config import MoEConfig
from megatron.model.variants import variant
from megatron.parallel.collectives import all_gather, gather_sequence, split_sequence
from megatron.parallel.mesh import Axis
from megatron.parallel.parameters import parameter
from megatron.parallel.recompute import recompute


class MoELayer(nn.Module):
    """Router, experts and, if there is one, a shared expert that every token passes.

    Each tensor-parallel rank routes its own part of the sequence, with sequence parallelism or without.
    """

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config, self.context = config, context
        init = input_init(config, config.num_experts)
        self.router = variant(Router, config)(config, config.hidden_size, init, context)
        self.experts = variant(Experts, config)(config, context)
        has_shared = config.moe_shared_expert_intermediate_size is not None
        self.shared_experts = SharedExpert(config, context) if has_shared else None

    def forward(
        self, x_sbh: Tensor, sequence_grad: Tensor | float | None = None, documents: bool = False
    ) -> Tensor:
        """[s, b, h] to [s, b, h].

        Args:
            sequence_grad: `LayerInputs.sequence_grad`; with it the gradients of the auxiliary losses are added.
            documents: attention keeps documents apart, which decides how ranks divide the positions.
        """
        return self.context.ops.communicate(self.compute, x_sbh, sequence_grad, documents)

    def compute(self, x_sbh: Tensor, sequence_grad: Tensor | float | None, documents: bool) -> Tensor:
        """`forward`, which compiled layers call between two graphs."""
        run = functools.partial(self.routed, sequence_grad=sequence_grad, documents=documents)
        out_sbh = recompute(run, x_sbh) if self.config.moe_layer_recompute else run(x_sbh)
        if self.shared_experts is None or self.config.moe_shared_expert_overlap:
            return out_sbh
        return out_sbh + self.shared_experts(x_sbh)

    def routed(self, x_sbh: Tensor, sequence_grad: Tensor | float | None, documents: bool) -> Tensor:
        """Output of the chosen experts, [s, b, h]; with --moe-shared-expert-overlap the shared expert's is added."""
        tp, whole_sbh, shared = self.context.tp, x_sbh, []

        def meanwhile() -> None:
            if self.shared_experts is not None and self.config.moe_shared_expert_overlap:
                shared.append(self.shared_experts(whole_sbh))

        # A generated token alone is routed by all ranks alike.
        splits = not self.context.sequence_parallel and x_sbh.shape[0] % tp.size == 0
        axis = self.context.sequence_parts if splits or self.context.sequence_parallel else self.context.cp
        if splits:
            x_sbh = split_sequence(x_sbh, tp)
        weights_nk, indices_nk = self.router(x_sbh, axis, sequence_grad)
        capacity = None
        if self.config.moe_expert_capacity_factor is not None:
            taken = expert_capacity(self.config, x_sbh.shape[0] * axis.size)
            shape, parts = x_sbh.shape[:2], (axis, self.context.cp, documents)
            dropped = dropped_copies(weights_nk, indices_nk, shape, taken, self.config, *parts)
            indices_nk = indices_nk.masked_fill(dropped, self.config.num_experts)
            record = self.router.record
            if record is not None and sequence_grad is not None and torch.is_grad_enabled():
                record({"dropped": dropped.sum()})
            if self.config.moe_pad_expert_input_to_capacity:
                capacity = taken * x_sbh.shape[1]
        trains, x_nh = sequence_grad is not None, x_sbh.flatten(0, 1)
        out_nh = self.dispatch(x_nh, weights_nk, indices_nk, capacity, meanwhile, trains=trains)
        out_sbh = out_nh.view_as(x_sbh)
        return sum(shared, gather_sequence(out_sbh, tp) if splits else out_sbh)

    def dispatch(
        self,
        x_nh: Tensor,
        weights_nk: Tensor,
        indices_nk: Tensor,
        capacity: int | None,
        meanwhile: Callable[[], None],
        *,
        trains: bool,
    ) -> Tensor:
        """Weighted sum of the outputs of each token's experts, [n, h]."""
        axis, experts = self.context.expert, self.experts
        # Without training, ranks may have different numbers of tokens.
        if axis.size > 1 and self.config.moe_token_dispatcher_type == "allgather" and trains:
            return by_all_gather(x_nh, weights_nk, indices_nk, experts, axis, capacity)
        parts = self.context.expert_tp
        drops = self.config.moe_expert_capacity_factor is not None
        return by_all_to_all(x_nh, weights_nk, indices_nk, experts, axis, parts, capacity, drops, meanwhile)


class SharedExpert(MLP):
    """An MLP for every token, times a sigmoid of the token with --moe-shared-expert-gate (Qwen2-MoE)."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context, config.moe_shared_expert_intermediate_size)
        self.gate_weight = None
        if config.moe_shared_expert_gate:
            self.gate_weight = parameter(context.replicated(1, config.hidden_size), input_init(config, 1))

    def forward(
        self, x_sbh: Tensor, sequence_grad: Tensor | float | None = None, documents: bool = False
    ) -> Tensor:
        out_sbh = super().forward(x_sbh)
        return out_sbh if self.gate_weight is None else out_sbh * (x_sbh @ self.gate_weight.t()).sigmoid()


def expert_capacity(config: MoEConfig, length: int) -> int:
    """Tokens of a sequence of `length` that an expert takes."""
    assert config.num_experts is not None and config.moe_expert_capacity_factor is not None
    mean = length * config.moe_router_topk / config.num_experts
    return min(math.ceil(mean * config.moe_expert_capacity_factor), length)


@torch.no_grad()
def dropped_copies(
    weights_nk: Tensor,
    indices_nk: Tensor,
    shape: tuple[int, ...],
    capacity: int,
    config: MoEConfig,
    axis: Axis,
    cp: Axis,
    documents: bool = False,
) -> Tensor:
    """True for each token and expert [n, k] beyond the expert's `capacity` for the sequence.

    The same in every layout, since all tokens of a sequence count.

    Args:
        shape: positions of this rank, and sequences.
        axis: ranks that hold the other parts of each sequence, those of `cp` among them.
        documents: as in `MoELayer.forward`.
    """
    (s, b), experts = shape, config.num_experts
    # By sequence, position and expert: the weight of the expert, or -1.
    used = weights_nk.new_full((s * b, experts or 0), -1.0).scatter_(1, indices_nk, weights_nk).view(s, b, -1)
    zigzag = Zigzag.of(s * axis.size, cp.size, documents=documents)
    used = zigzag.restore(all_gather(used, axis).unflatten(0, (cp.size, -1)))
    if config.moe_token_drop_policy == "position":
        rank = (used != -1).cumsum(0) - 1  # NaN counts, too
    else:
        order = used.sort(dim=0, descending=True, stable=True).indices
        positions = torch.arange(len(used), device=used.device).view(-1, 1, 1).expand_as(order)
        rank = torch.empty_like(order).scatter_(0, order, positions)
    rank, begin = zigzag.shard(rank, 0, cp.rank), axis.rank * s % (len(rank) // cp.size)
    mine = rank[begin : begin + s].flatten(0, 1)
    return mine.gather(1, indices_nk) >= capacity
