"""Lion (arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.flags import Config, flag
from megatron.optim.spec import OptimizerSpec, Shard, StepInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class LionConfig(Config):
    lion_beta1: float = flag(0.9, "Lion: weight of the momentum in the update", low=0, below=1)
    lion_beta2: float = flag(0.99, "Lion: decay of the momentum", low=0, below=1)


class Lion(OptimizerSpec):
    """Lion, the sign of momentum, with decoupled weight decay."""

    config_class = LionConfig

    def __init__(self, config: LionConfig) -> None:
        self.beta1, self.beta2 = config.lion_beta1, config.lion_beta2
        self.state = {"exp_avg": "float32"}

    def step(self, shards: Sequence[Shard], inputs: StepInputs) -> None:
        lr, taken = inputs.lr, 1 - inputs.found_inf
        for shard in shards:
            grad, exp_avg = shard.scaled_grad(inputs), shard.state["exp_avg"]
            update = exp_avg.lerp(grad, 1 - self.beta1).sign_()
            shard.weight.mul_(1 - taken * (lr * inputs.weight_decay)).sub_(update.mul_(taken * lr))
            exp_avg.lerp_(grad, taken * (1 - self.beta2))
