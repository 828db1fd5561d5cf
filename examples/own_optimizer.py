"""An optimizer of your own: signSGD with momentum.

python -m examples.own_optimizer [flags of pretrain_gpt.py]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.flags import Config, flag
from megatron.optim.registry import OPTIMIZERS
from megatron.optim.spec import OptimizerSpec, StepInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignSGDConfig(Config):
    signsgd_momentum: float = flag(0.9, "signSGD: momentum", low=0, below=1)


class SignSGD(OptimizerSpec):
    """The sign of the momentum, with decoupled weight decay."""

    config_class = SignSGDConfig

    def __init__(self, config: SignSGDConfig) -> None:
        self.momentum = config.signsgd_momentum
        self.state = {"momentum_buffer": "float32"}  # checkpoints hold it; it has the shape of the weights

    def step(self, shards: Sequence[Any], inputs: StepInputs) -> None:
        taken = 1 - inputs.found_inf  # 0 where a gradient is not finite: then nothing may change
        for shard in shards:
            momentum = shard.state["momentum_buffer"]
            momentum.lerp_(shard.scaled_grad(inputs), taken * (1 - self.momentum))
            shard.weight.mul_(1 - taken * (inputs.lr * inputs.weight_decay))
            shard.weight.sub_(momentum.sign() * (taken * inputs.lr))


OPTIMIZERS["signsgd"] = SignSGD  # before megatron.api is imported, which makes flags of all optimizers

from megatron.api import GPT, main

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
DATA = {"tokenizer_type": "NullTokenizer", "vocab_size": 256, "mock_data": True, "micro_batch_size": 8}

if __name__ == "__main__":
    run = {"optimizer": "signsgd", "lr": 1e-3, "train_iters": 100}
    main(GPT, description=__doc__, defaults=MODEL | DATA | run)
