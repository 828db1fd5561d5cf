"""SGD with momentum, by torch's fused kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron.flags import Config, flag
from megatron.optim.spec import OptimizerSpec, Shard, StepInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGDConfig(Config):
    sgd_momentum: float = flag(0.9, "SGD: momentum", low=0, below=1)


class SGD(OptimizerSpec):
    """SGD with momentum, weight decay added to the gradient."""

    config_class = SGDConfig

    def __init__(self, config: SGDConfig) -> None:
        self.config = config
        self.state = {"momentum_buffer": "float32"}

    def step(self, shards: Sequence[Shard], inputs: StepInputs) -> None:
        from torch.optim.sgd import sgd

        sgd(
            [shard.weight for shard in shards],
            [shard.grad for shard in shards],
            [shard.state["momentum_buffer"] for shard in shards],
            lr=inputs.lr,
            weight_decay=inputs.weight_decay,
            momentum=self.config.sgd_momentum,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            fused=True,
            grad_scale=inputs.grad_scale,
            found_inf=inputs.found_inf,
        )
