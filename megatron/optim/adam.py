"""AdamW (arXiv 1711.05101, algorithm 2), by torch's fused kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.optim.spec import OptimizerSpec, Shard, StepInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamConfig(Config):
    adam_beta1: float = flag(0.9, "Adam: decay of the first moment", low=0, below=1)
    adam_beta2: float = flag(0.999, "Adam: decay of the second moment", low=0, below=1)
    adam_eps: float = flag(1e-8, "Adam: term added to the denominator", above=0)
    bf16_optimizer_states: bool = flag(
        False,
        "Adam: keep both moments in bf16; they and the fp32 weight take 8 bytes per parameter instead of 12",
    )


class Adam(OptimizerSpec):
    """Adam with decoupled weight decay (AdamW)."""

    config_class = AdamConfig

    @classmethod
    def check(cls, config: Any) -> None:
        if config.bf16_optimizer_states and config.optimizer != "adam":
            raise InputError(f"--bf16-optimizer-states needs --optimizer adam, not {config.optimizer}")

    def __init__(self, config: AdamConfig) -> None:
        self.config = config
        dtype = "bfloat16" if config.bf16_optimizer_states else "float32"
        self.state = {"exp_avg": dtype, "exp_avg_sq": dtype}

    def step(self, shards: Sequence[Shard], inputs: StepInputs) -> None:
        # The function, not the class, which imports torch's compiler: a second at the start of each process.
        from torch.optim.adamw import adamw

        from megatron.optim.bf16_adam import bf16_adamw

        config = self.config
        update = bf16_adamw if config.bf16_optimizer_states else adamw
        update(
            [shard.weight for shard in shards],
            [shard.grad for shard in shards],
            [shard.state["exp_avg"] for shard in shards],
            [shard.state["exp_avg_sq"] for shard in shards],
            [],
            list(inputs.steps.repeat(len(shards)).unbind()),
            lr=inputs.lr,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=inputs.weight_decay,
            amsgrad=False,
            maximize=False,
            fused=True,
            grad_scale=inputs.grad_scale,
            found_inf=inputs.found_inf,
        )
