"""Keep the checkpoint with the lowest validation loss (--save-best)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron.checkpoint.storage import folder_of, newest_iteration, replace_text
from megatron.errors import InputError, TrainingFault
from megatron.parallel.collectives import all_reduce_max, raise_on_all_ranks
from megatron.recipes.best import keep_best
from megatron.recipes.config import SaveBestConfig
from megatron.training.loop import Hook, Trainer
from megatron.training.report import EvalResult

LOSS = "validation_loss.json"  # in the folder of a checkpoint that was the best


class SaveBest(Hook):
    """Keep the checkpoint with the lowest validation loss in the folder `best` of --save. Comes after `Saving`.

    The previous best is deleted once the new one is whole. A loss of several terms is their sum.
    """

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        self.evaluated, self.loss = 0, math.nan  # the last evaluation's iteration and loss
        self.on = trainer.config.plugin(SaveBestConfig).save_best and not trainer.config.training.skip_train
        if self.on:
            first = trainer.mesh.is_first
            lowest = lowest_before(_root(trainer), trainer.state.iteration + 1) if first else -math.inf
            # Other machines may not see the folder's newest state.
            (self.lowest,) = all_reduce_max(torch.tensor([lowest]).double(), trainer.mesh.world).tolist()
        yield

    def after_evaluation(self, trainer: Trainer, result: EvalResult) -> None:
        values = result.values
        names = [f"{name} validation" for name in trainer.task.loss_names]
        if all(name in values for name in names):
            self.evaluated, self.loss = trainer.state.iteration, sum(values[name] for name in names)

    def before_training(self, trainer: Trainer) -> None:
        self._keep(trainer)  # an evaluation that an interrupted run left to this one

    def after_step(self, trainer: Trainer) -> None:
        self._keep(trainer)

    def at_end(self, trainer: Trainer) -> None:
        self._keep(trainer)

    def _keep(self, trainer: Trainer) -> None:
        """Keep the checkpoint of this iteration if its evaluation gave the lowest loss. Every process must call it."""
        iteration = trainer.state.iteration
        if not self.on or not iteration or self.evaluated != iteration or not self.loss < self.lowest:
            return
        root, self.lowest = _root(trainer), self.loss
        with trainer.clock.paused():
            if trainer.saver.iteration != iteration:
                trainer.save()
            trainer.saver.wait()
            try:
                with raise_on_all_ranks(trainer.mesh.world):
                    if trainer.mesh.is_first:
                        replace_text(
                            folder_of(root, iteration) / LOSS, json.dumps({"loss": self.loss}) + "\n"
                        )
                        best = keep_best(root, iteration)
                        trainer.log(f"lowest validation loss so far: {self.loss:.4f}, kept in {best}")
            except OSError as error:
                raise TrainingFault(
                    f"--save-best: cannot keep the checkpoint in {root / 'best'}: {error}"
                ) from None


def lowest_before(root: Path, iteration: int) -> float:
    """The loss of the checkpoint in `best`; infinite without one.

    One of `iteration` or later belongs to a run that was rolled back since, and does not count.
    """
    try:
        best = newest_iteration(root / "best")
        if best is None or best >= iteration:
            return math.inf
        return float(json.loads((folder_of(root / "best", best) / LOSS).read_text(encoding="utf-8"))["loss"])
    except (InputError, OSError, ValueError, LookupError, TypeError):  # missing or damaged
        return math.inf


def _root(trainer: Trainer) -> Path:
    assert trainer.config.checkpoint.save is not None  # checked by SaveBestConfig
    return Path(trainer.config.checkpoint.save)
