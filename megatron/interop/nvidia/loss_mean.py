"""The mean of the loss that Megatron-LM minimizes by default, for --loss-mean microbatches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron.errors import InputError
from megatron.flags import flag
from megatron.training.config import PluginConfig, RunConfig
from megatron.training.task import Task

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossMeanConfig(PluginConfig):
    """The mean of the loss, where microbatches differ in their number of tokens that count."""

    loss_mean: str = flag(
        "tokens",
        "mean of the loss: over the tokens of the global batch, or over the means of its microbatches, as in "
        "Megatron-LM without --calculate-per-token-loss; the latter depends on --micro-batch-size and the layout",
        choices=("tokens", "microbatches"),
    )

    def check(self, run: RunConfig) -> None:
        if self.loss_mean == "microbatches" and run.parallel.context_parallel_size > 1:
            raise InputError(
                f"--context-parallel-size: {run.parallel.context_parallel_size} needs --loss-mean tokens; use it"
            )


def with_microbatch_means(task: Task) -> Task:
    """The same task, with microbatches that count the same, whatever their number of tokens."""

    def denominators(batch: Any) -> Tensor:
        counts = task.loss_denominators(batch)
        return counts.new_ones(counts.shape)

    def forward(model: Any, batch: Any, x: Tensor | None, dropout_key: Any) -> Tensor:
        counts = task.loss_denominators(batch).clamp(min=1)
        if batch.loss_grad is not None:
            batch = dataclasses.replace(batch, loss_grad=batch.loss_grad / counts)
        out = task.forward(model, batch, x, dropout_key)
        # The model's last chunk returns the sums of the losses, [terms]; others return hidden states.
        return out / counts if out.ndim == 1 else out

    return dataclasses.replace(task, loss_denominators=denominators, forward=forward)
