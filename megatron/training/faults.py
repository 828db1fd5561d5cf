"""What ends a run whose numbers have gone wrong."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NoReturn

import torch

from megatron.data.loader import train_batches
from megatron.flags import PassingFault, TrainingFault
from megatron.parallel.collectives import gather_texts
from megatron.training.diagnosis import diagnose, spoiled_weights

if TYPE_CHECKING:
    from megatron.training.loop import Trainer


def stop_on_non_finite(trainer: Trainer, iteration: int, consumed_samples: int) -> NoReturn:
    """Go back to before an iteration whose gradient was not finite, say why it was not, save, and end the run.

    The weights are those before it: the optimizer has left it and all that followed out. `consumed_samples` are those
    before it. Every process must take part.
    """
    progress, config = trainer.progress, trainer.config
    faulty = iteration in progress.history.faulty
    progress.iteration, progress.consumed_samples = iteration - 1, consumed_samples
    progress.evaluation_due = False
    progress.history.rows = [row for row in progress.history.rows if row["iteration"] < iteration]
    weights = spoiled_weights(trainer.engine)
    kept = "and nothing was saved" if weights else _keep(trainer)
    scaler = trainer.engine.optimizer.scaler
    scaled = (
        "" if scaler is None else f" at a loss scale of {scaler.scale.item():g}, which can fall no further"
    )
    said = f"iteration {iteration}: the loss or its gradient is not finite{scaled}; no weights were changed, {kept}. "
    if weights:
        raise PassingFault(f"{said}They were not finite before: {weights}; a machine has altered them")
    try:
        batches = train_batches(
            trainer.datasets["train"],
            dataclasses.replace(config.data, num_workers=0),
            consumed_samples=consumed_samples,
            **trainer.loader_arguments(),
        )
        found = diagnose(
            trainer.engine,
            batches,
            num_microbatches=trainer.batch_schedule.num_microbatches(consumed_samples),
            consumed_samples=consumed_samples,
        )
    except torch.OutOfMemoryError as error:
        why = str(error).splitlines()[0]
        raise TrainingFault(
            f"{said}There is too little memory to find out where it came from: {why}"
        ) from None
    lower = ", or a lower --loss-scale" if scaler is not None and scaler.fixed else ""
    if found.repeats:
        raise TrainingFault(
            f"{said}Computed again it is not finite either: {found}. Go on from an earlier checkpoint (--ckpt-step) "
            f"with a lower --lr or a longer warm-up{lower}, or leave such iterations out with --on-non-finite skip"
        )
    raise PassingFault(
        f"{said}Computed again it is finite: a machine miscalculated. {_whose(trainer, faulty)}"
    )


def _keep(trainer: Trainer) -> str:
    """Save where the run stands, unless that is saved already; says what was done."""
    root, iteration = trainer.config.checkpoint.save, trainer.progress.iteration
    if root is None:
        return "and nothing was saved, without --save"
    if iteration == 0:
        return "and nothing was saved, it being the first"
    if trainer.saver.iteration != iteration:
        trainer.save()
    trainer.saver.wait()
    return f"and {root} holds them as of iteration {iteration}"


def _whose(trainer: Trainer, faulty: bool) -> str:
    """Which replicas' losses were not finite, as far as it is known, the step not being so any more."""
    mesh = trainer.mesh
    told = gather_texts("x" if faulty else "", mesh.world)
    ranks = [rank for rank, text in enumerate(told) if text]
    if not ranks:
        return "All losses were finite, so that it is not known on which rank"
    return (
        f"The loss was not finite on rank {', '.join(map(str, ranks))}; look at its replica's machines first"
    )
