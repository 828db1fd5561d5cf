"""Progress of a run: everything that changes while it trains, beside weights and optimizer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron.errors import InputError
from megatron.optim.schedule import Schedule
from megatron.training.report import History


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """Progress of a run, saved with every checkpoint.

    Attributes:
        history: values of the iterations since the last log line.
        schedule: of the learning rate and weight decay.
        train_samples: samples that the order of the training data was made for.
        evaluation_due: the run stopped where it should have evaluated.
        bad_steps: the number of iterations without a finite gradient at the end of those reported.
    """

    history: History
    schedule: Schedule
    train_samples: int
    iteration: int = 0
    consumed_samples: int = 0
    evaluation_due: bool = False
    bad_steps: int = 0

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON; a value that is not finite is null."""
        rows = [{k: v if math.isfinite(v) else None for k, v in row.items()} for row in self.history.rows]
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "train_samples": self.train_samples,
            "evaluation_due": self.evaluation_due,
            "bad_steps": self.bad_steps,
            "history": rows,
            "schedule": dataclasses.asdict(self.schedule),
        }

    def load_progress(self, state: dict[str, Any]) -> None:
        """Load everything but the schedule and `train_samples` from what `state_dict` gave.

        Raises:
            InputError: the history lacks a loss of this run's task.
        """
        names = {"iteration", "consumed samples", "grad norm", "skipped", *self.history.loss_names}
        if any(not names <= row.keys() for row in state["history"]):
            raise InputError("'history' lacks a loss or the gradient's norm")
        self.history.rows = [
            {k: math.nan if v is None else v for k, v in row.items()} for row in state["history"]
        ]
        self.iteration, self.consumed_samples = state["iteration"], state["consumed_samples"]
        self.evaluation_due, self.bad_steps = state["evaluation_due"], state["bad_steps"]
