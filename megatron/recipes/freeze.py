"""Parameters that training leaves as they are (--freeze)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from megatron.errors import InputError
from megatron.optim.spec import OptimizerSpec, Shard, StepInputs
from megatron.parallel.collectives import all_reduce_max
from megatron.recipes.config import FreezeConfig
from megatron.training.config import RunConfig
from megatron.training.loop import Hook, Trainer


class Frozen(OptimizerSpec):
    """No updates: the parameters keep their values, have no state, and do not count in the gradient's norm."""

    def __init__(self, config: RunConfig) -> None:
        self.patterns = config.plugin(FreezeConfig).freeze or ()
        self.state = {}

    def updates(self, name: str, p: nn.Parameter) -> bool:
        # The first and the last pipeline stage know a tied table by different names.
        name = getattr(p, "tied", None) or name
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def prepare(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            shard.grad.zero_()

    def step(self, shards: Sequence[Any], inputs: StepInputs) -> None:
        pass


class FreezeCheck(Hook):
    """Check that each pattern of --freeze matches a parameter, and that others are left to train."""

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        patterns, buffer = trainer.config.plugin(FreezeConfig).freeze or (), trainer.engine.buffer
        names = [param.name for param in buffer.flat_params]
        found = [any(fnmatchcase(name, pattern) for name in names) for pattern in patterns]
        trained = any(not isinstance(bucket.group.optimizer, Frozen) for bucket in buffer.buckets)
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
            frozen = [b for b in buffer.buckets if isinstance(b.group.optimizer, Frozen)]
            trainer.log(
                f"--freeze: parameters frozen on the first rank: {sum(len(b.flat_params) for b in frozen)}"
            )
        yield
