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
from megatron.files import read_file
from megatron.parallel.collectives import all_reduce_max, raise_on_all_ranks
from megatron.recipes.best import keep_best
from megatron.recipes.config import SaveBestConfig
from megatron.training.loop import Hook, Trainer
from megatron.training.report import EvalResult

LOSS = "validation_loss.json"  # in the folder of a checkpoint that was the best
# In the folder of --save: iteration and loss of an evaluation whose checkpoint is still to be kept.
CANDIDATE = "best-candidate.json"
MAX_CANDIDATE_BYTES = 1000


class SaveBest(Hook):
    """Keep the checkpoint with the lowest validation loss in the folder `best` of --save. Comes after `Saving`.

    The previous best is deleted once the new one is whole. A loss of several terms is their weighted sum.
    """

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        self.evaluated, self.loss = 0, math.nan  # the last evaluation's iteration and loss
        self.on = trainer.config.plugin(SaveBestConfig).save_best and not trainer.config.training.skip_train
        if self.on:
            root, iteration = _root(trainer), trainer.state.iteration
            values = [-math.inf] * 3
            if trainer.mesh.is_first:
                values = [lowest_before(root, iteration + 1), *candidate_of(root, iteration)]
            # Other machines may not see the folder's newest state.
            shared = all_reduce_max(torch.tensor(values).double(), trainer.mesh.world).tolist()
            self.lowest, self.evaluated, self.loss = shared
        yield

    def after_evaluation(self, trainer: Trainer, result: EvalResult) -> None:
        values = result.values
        names = [f"{name} validation" for name in trainer.task.loss_names]
        if not all(name in values for name in names):
            return
        self.evaluated, self.loss = (
            trainer.state.iteration,
            trainer.task.total_loss({name: values[f"{name} validation"] for name in trainer.task.loss_names}),
        )
        if self._is_lowest(trainer):
            with _writing(trainer):
                # A run that is killed before it keeps the checkpoint does so when it resumes.
                text = json.dumps({"iteration": self.evaluated, "loss": self.loss}) + "\n"
                if trainer.mesh.is_first:
                    replace_text(_root(trainer) / CANDIDATE, text)

    def before_training(self, trainer: Trainer) -> None:
        self._keep(trainer)  # an evaluation that an interrupted run left to this one

    def after_step(self, trainer: Trainer) -> None:
        self._keep(trainer)

    def at_end(self, trainer: Trainer) -> None:
        self._keep(trainer)

    def _keep(self, trainer: Trainer) -> None:
        """Keep the checkpoint of this iteration if its evaluation gave the lowest loss. Every process must call it."""
        if not self._is_lowest(trainer):
            return
        root, iteration, self.lowest = _root(trainer), trainer.state.iteration, self.loss
        with trainer.clock.paused():
            if trainer.saver.iteration != iteration:
                trainer.save()
            trainer.saver.wait()
            with _writing(trainer):
                if trainer.mesh.is_first:
                    replace_text(folder_of(root, iteration) / LOSS, json.dumps({"loss": self.loss}) + "\n")
                    best = keep_best(root, iteration)
                    trainer.log(f"lowest validation loss so far: {self.loss:.4f}, kept in {best}")

    def _is_lowest(self, trainer: Trainer) -> bool:
        """True if an evaluation of this iteration, which is not the first, gave the lowest loss so far."""
        return self.on and 0 < self.evaluated == trainer.state.iteration and self.loss < self.lowest


@contextmanager
def _writing(trainer: Trainer) -> Iterator[None]:
    """Context in which the first process writes; an error ends all processes."""
    try:
        with raise_on_all_ranks(trainer.mesh.world):
            yield
    except OSError as error:
        best = _root(trainer) / "best"
        raise TrainingFault(f"--save-best: cannot keep the checkpoint in {best}: {error}") from None


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


def candidate_of(root: Path, iteration: int) -> tuple[int, float]:
    """The iteration and loss of the evaluation in `CANDIDATE`; zeros if there is none of `iteration`."""
    try:
        candidate = json.loads(read_file(root / CANDIDATE, MAX_CANDIDATE_BYTES))
        if candidate["iteration"] == iteration:
            return iteration, float(candidate["loss"])
        (root / CANDIDATE).unlink()  # of a checkpoint that was not written, or was rolled back
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # missing or damaged
        pass
    return 0, 0.0


def _root(trainer: Trainer) -> Path:
    assert trainer.config.checkpoint.save is not None  # checked by SaveBestConfig
    return Path(trainer.config.checkpoint.save)
