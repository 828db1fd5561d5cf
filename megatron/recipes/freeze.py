"""Parameters that training leaves as they are (--freeze)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from megatron.errors import InputError
from megatron.optim.spec import OptimizerSpec, Shard, StepInputs
from megatron.parallel.collectives import all_reduce_max
from megatron.recipes.config import FreezeConfig
from megatron.recipes.expert_balance import ExpertBias
from megatron.training.config import RunConfig
from megatron.training.loop import Hook, Trainer


class Frozen(OptimizerSpec):
    """No updates: the parameters keep their values, have no state, and do not count in the gradient's norm."""

    trains = False

    def __init__(self, config: RunConfig) -> None:
        self.patterns = config.plugin(FreezeConfig).freeze or ()
        self.state = {}

    def updates(self, name: str, p: nn.Parameter) -> bool:
        return _matches(name, p, self.patterns)

    def prepare(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            shard.grad.zero_()

    def step(self, shards: Sequence[Any], inputs: StepInputs) -> None:
        pass


class FrozenBias(ExpertBias):
    """Leaves the bias as it is: fp32 with the load as its state, as without --freeze."""

    trains = False

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.patterns = config.plugin(FreezeConfig).freeze or ()

    def updates(self, name: str, p: nn.Parameter) -> bool:
        return super().updates(name, p) and _matches(name, p, self.patterns)

    def updated(self, weight: Tensor, load: Tensor) -> Tensor:
        return weight


def _matches(name: str, p: nn.Parameter, patterns: Sequence[str]) -> bool:
    # The first and the last pipeline stage know a tied table by different names.
    name = getattr(p, "tied", None) or name
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class FreezeCheck(Hook):
    """Check that each pattern of --freeze matches a parameter, and that others are left to train."""

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        patterns, buffer = trainer.config.plugin(FreezeConfig).freeze or (), trainer.engine.buffer
        names = [param.name for param in buffer.flat_params]
        found = [any(fnmatchcase(name, pattern) for name in names) for pattern in patterns]
        trained = any(bucket.group.optimizer.trains for bucket in buffer.buckets)
        # Each stage has other parameters.
        *matched, any_left = all_reduce_max(
            torch.tensor([*found, trained], dtype=torch.int32, device=trainer.mesh.device), trainer.mesh.pp
        ).tolist()
        for pattern, yes in zip(patterns, matched, strict=True):
            if not yes:
                raise InputError(
                    f"--freeze: {pattern} matches no parameter; names of this model are {names[0]}, ..., {names[-1]}"
                )
        if not any_left:
            raise InputError(f"--freeze: {' '.join(patterns)} leaves no parameter to train")
        if patterns:
            frozen = [b for b in buffer.buckets if isinstance(b.group.optimizer, (Frozen, FrozenBias))]
            trainer.log(
                f"--freeze: parameters frozen on the first rank: {sum(len(b.flat_params) for b in frozen)}"
            )
        yield
