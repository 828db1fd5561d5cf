"""Progress of a run: everything that changes while it trains, beside weights and optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from megatron.checkpoint.checkpoint import check_fields, is_count
from megatron.optim.optimizer import Optimizer
from megatron.optim.schedule import Schedule
from megatron.training.report import History


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """Progress of a run, saved with every checkpoint.

    The state of the optimizer's rules stays on the device; it is saved and loaded here.

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

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state as JSON; a value that is not finite is null."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "train_samples": self.train_samples,
            "evaluation_due": self.evaluation_due,
            "bad_steps": self.bad_steps,
            "history": [
                {k: v if math.isfinite(v) else None for k, v in row.items()} for row in self.history.rows
            ],
            "schedule": dataclasses.asdict(self.schedule),
            **{rule.name: rule.state() for rule in optimizer.rules},
        }

    def load_state_dict(self, state: dict[str, Any], optimizer: Optimizer) -> None:
        """Load what `state_dict` gave, except `train_samples`, which is fixed once the datasets are built.

        Raises:
            InputError: a value is missing or wrong, or the history lacks a loss of this run's task.
        """
        columns = {"iteration", "consumed samples", "grad norm", "skipped", *self.history.loss_names}
        checks: dict[str, Callable[[Any], bool]] = {
            "evaluation_due": lambda value: isinstance(value, bool),
            "bad_steps": is_count,
            "history": lambda rows: isinstance(rows, list) and all(_is_row(row, columns) for row in rows),
            "schedule": _is_schedule,
        }
        # Checkpoints of a run without a rule, and older ones, lack its state.
        kept = [rule for rule in optimizer.rules if state.get(rule.name) is not None]
        check_fields(state, checks | {rule.name: rule.is_state for rule in kept})
        self.iteration, self.consumed_samples = state["iteration"], state["consumed_samples"]
        self.evaluation_due, self.bad_steps = state["evaluation_due"], state["bad_steps"]
        self.history.rows = [
            {k: math.nan if v is None else v for k, v in row.items()} for row in state["history"]
        ]
        self.schedule = Schedule(**state["schedule"])
        for rule in kept:
            rule.load(state[rule.name])


def _is_row(value: Any, columns: set[str]) -> bool:
    """True for a row of a `History` that has at least these columns."""
    return (
        isinstance(value, dict)
        and value.keys() >= columns
        and all(x is None or _is_number(x) for x in value.values())
    )


def _is_schedule(value: Any) -> bool:
    """True for the fields of a `Schedule`."""
    texts = {f.name: f.type == "str" for f in dataclasses.fields(Schedule)}
    return (
        isinstance(value, dict)
        and value.keys() == texts.keys()
        and all(isinstance(x, str) if texts[name] else _is_number(x) for name, x in value.items())
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300
