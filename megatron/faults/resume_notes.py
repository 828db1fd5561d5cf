"""Notes on how a resumed run differs from the one that saved its checkpoint: schedule, operations, data order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.optim.schedule import Schedule
from megatron.training.loop import Trainer
from megatron.training.start import run_length

# The flags from which each field of a schedule follows.
SCHEDULE_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "init_lr": "--lr-warmup-init",
    "warmup": "warm-up samples (--lr-warmup-iters, -samples, -fraction)",
    "decay": "decay samples (--lr-decay-iters, -samples, --train-iters, -samples)",
    "decay_style": "--lr-decay-style",
    "wsd_decay": "samples of the last phase of WSD (--lr-wsd-decay-iters, -samples)",
    "wsd_decay_style": "--lr-wsd-decay-style",
    "start_weight_decay": "weight decay at the start (--weight-decay, --start-weight-decay)",
    "end_weight_decay": "weight decay at the end (--weight-decay, --end-weight-decay)",
    "weight_decay_style": "--weight-decay-incr-style",
    "train_samples": "training samples (--train-iters, --train-samples)",
}
# Flags that decide which training samples come next, by the section of the configuration.
ORDER_FLAGS = {
    "training": ["seed"],
    "data": (
        "data_path train_data_path split seq_length data_order dataloader_type packing mock_data "
        "mask_prob short_seq_prob"
    ).split(),
}


def resume_notes(trainer: Trainer, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note for each difference that changes the results of the run."""
    if (note := schedule_note(trainer, checkpoint)) is not None:
        yield note
    before, now = checkpoint.state.get("operations"), trainer.engine.ops.kinds
    if before is not None and tuple(before) != now:
        yield (
            f"{checkpoint.folder} was computed with {', '.join(before)} and this run computes with {', '.join(now)}, "
            "so it does not continue bit for bit"
        )
    if changed := order_changes(trainer, checkpoint):
        yield f"the order of the training data may change from here on: {', '.join(changed)}"


def schedule_note(trainer: Trainer, checkpoint: Checkpoint) -> str | None:
    """Text on a schedule of learning rate and weight decay that is not the one in a checkpoint, and the one in use."""
    config, state, batches = trainer.config, trainer.state, trainer.batch_schedule
    _, samples = run_length(config, batches, state.iteration, state.consumed_samples)
    given = Schedule.from_config(
        config.optimizer, global_batch_size=batches.global_batch_size, train_samples=samples
    )
    saved, n = Schedule(**checkpoint.state["schedule"]), state.consumed_samples
    rows = [(f.name, vars(saved)[f.name], vars(given)[f.name]) for f in dataclasses.fields(Schedule)]
    changed = [f"{SCHEDULE_FLAGS[name]} changed from {old} to {new}" for name, old, new in rows if old != new]
    if not changed:
        return None
    keeps = config.optimizer.use_checkpoint_opt_param_scheduler
    return (
        f"the schedule of learning rate and weight decay differs from the checkpoint's ({', '.join(changed)}); using "
        f"that of the {'checkpoint' if keeps else 'command line'}. Learning rate of iteration {state.iteration + 1}: "
        f"{saved.lr(n):.3E} by the checkpoint's, {given.lr(n):.3E} by the command line's"
    )


def order_changes(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Flags that decide which samples come next and differ from the run that saved a checkpoint."""
    saved, changed = checkpoint.state["config"], []
    for section, names in ORDER_FLAGS.items():
        given = getattr(trainer.config, section)
        for name in names:
            # A checkpoint from before a flag existed has the flag's default.
            before, after = saved.get(section, {}).get(name, getattr(type(given), name)), getattr(given, name)
            after = list(after) if isinstance(after, tuple) else after
            if name in ("data_path", "train_data_path") and _file_names(before) == _file_names(after):
                continue  # the same files in another folder
            if before != after:
                changed.append(f"--{name.replace('_', '-')} changed from {before} to {after}")
    return changed


def _file_names(paths: list[str] | None) -> list[str]:
    """Names of a data flag's files, without folders."""
    return [Path(path).name for path in paths or ()]
