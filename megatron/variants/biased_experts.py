"""Experts and routers with biases, as in gpt-oss (arXiv 2508.10925).

Shapes in names: m rows (a copy of a token for each expert that it chose), h hidden, f width of an expert, e experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.moe.experts import Experts
from megatron.model.moe.router import Router
from megatron.model.moe_config import MoEConfig
from megatron.ops.embedding import embedding
from megatron.parallel.parameters import Init, parameter, zeros
from megatron.parallel.slices import GlobalSlice, whole


class BiasedExperts(Experts):
    """Experts with a bias after each of their products.

    `bias1` [experts · f, or 2f with a gate] is divided as `weight1` is. Ranks that share an expert each hold a part of
    its rows of `bias2` [experts · h], which they add to that part of the output, since outputs are summed over them.
    """

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        rows, h = self.weight1.shard_spec, config.hidden_size
        shape, ranges = rows.shape[:1], rows.ranges
        self.bias1 = parameter(GlobalSlice(shape, 0, ranges, expert_parallel=True), zeros)
        part, width = context.expert.rank % context.expert_tp, h // context.expert_tp
        self.begin, self.hidden = part * width, h
        columns = tuple((h * e + self.begin, h * e + self.begin + width) for e in self.local)
        if context.expert_tp == 1:
            columns = ((columns[0][0], columns[-1][1]),)
        assert config.num_experts is not None
        spec = GlobalSlice((config.num_experts * h,), 0, columns, expert_parallel=True)
        self.bias2 = parameter(spec, zeros)

    def forward(self, x_mh: Tensor, weights_m: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
        counts = self.located(counts, x_mh.device)
        numbers = torch.as_tensor(counts, device=x_mh.device)
        local = torch.arange(len(self.local), device=x_mh.device)
        expert_m = torch.repeat_interleave(local, numbers, output_size=len(x_mh))
        bias2 = embedding(expert_m, self.bias2.view(len(local), -1))
        x_mf = self.product(x_mh, self.weight1, counts, transposed=False)
        x_mf = x_mf + embedding(expert_m, self.bias1.view(len(local), -1))
        x_mf = self.ops.activation(x_mf, self.activation)
        weights_m1 = weights_m.unsqueeze(1).to(x_mf.dtype)
        out_mh = self.product(x_mf * weights_m1, self.weight2, counts, transposed=True)
        out_bias_mh = bias2 * weights_m1
        if (width := bias2.shape[1]) < self.hidden:
            out_bias_mh = F.pad(out_bias_mh, (self.begin, self.hidden - self.begin - width))
        return out_mh.add_(out_bias_mh)


class BiasedRouter(Router):
    """A router with a bias of its logits, which learns like the other weights."""

    def __init__(self, config: MoEConfig, hidden_size: int, init: Init, context: ModelContext) -> None:
        super().__init__(config, hidden_size, init, context)
        assert config.num_experts is not None
        spec = whole(config.num_experts, replicas=context.tp, partial=context.tp.size > 1)
        self.bias = parameter(spec, zeros)

    def logits(self, x_sbh: Tensor) -> Tensor:
        """[s, b, e] in the router's precision."""
        return super().logits(x_sbh) + self.bias.to(self.dtype)


# By the flag that chooses them, as in `megatron.model.variants.VARIANTS`.
VARIANTS: dict[str, dict[type, type]] = {"add_expert_bias": {Experts: BiasedExperts, Router: BiasedRouter}}
