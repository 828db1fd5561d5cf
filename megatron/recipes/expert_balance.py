"""Optimizers of the router's vectors whose gradient is the load of the experts (`megatron.model.moe.router`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from megatron.optim.spec import OptimizerSpec, Shard, StepInputs
from megatron.training.config import RunConfig


class _LoadSpec(OptimizerSpec):
    """Base: takes the load out of the gradients before their norm is taken.

    The state "load" is the gradient of the last step.
    """

    suffix: str
    counts = True

    def __init__(self, config: RunConfig) -> None:
        self.state = {"load": "float32"}
        self.rate = config.model.moe_router_bias_update_rate

    def updates(self, name: str, p: nn.Parameter) -> bool:
        return name.endswith(self.suffix)

    def prepare(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            shard.state["load"].copy_(shard.grad)
            shard.grad.zero_()

    def step(self, shards: Sequence[Any], inputs: StepInputs) -> None:
        for shard in shards:
            new = self.updated(shard.weight, shard.state["load"])
            shard.weight.copy_(new.where(inputs.found_inf == 0, shard.weight))

    @abstractmethod
    def updated(self, weight: Tensor, load: Tensor) -> Tensor:
        """The new weight."""


class ExpertBias(_LoadSpec):
    """Lowers the bias of experts with more tokens than the mean, and raises that of the others (arXiv 2408.15664
    algorithm 1)."""

    suffix = "router.expert_bias"

    def updated(self, weight: Tensor, load: Tensor) -> Tensor:
        return weight - self.rate * load.sign()


class LastLoad(_LoadSpec):
    """Keeps the load for the auxiliary loss of the next global batch."""

    suffix = "router.load"
    trains = False  # does not count as a parameter that --freeze leaves to train

    def updated(self, weight: Tensor, load: Tensor) -> Tensor:
        return load
