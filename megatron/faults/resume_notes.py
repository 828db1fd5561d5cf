"""Notes on how a resumed run differs from the one that saved its checkpoint: operations, and the order of the data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.training.loop import Trainer

# Flags that decide which training samples come next, by the section of the configuration.
ORDER_FLAGS = {
    "training": ["seed"],
    "data": (
        "data_path train_data_path split seq_length data_order dataloader_type mock_data mask_prob short_seq_prob"
    ).split(),
}


def resume_notes(trainer: Trainer, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note for each difference that changes the results of the run."""
    before, now = checkpoint.state.get("operations"), trainer.engine.ops.kinds
    if before is not None and tuple(before) != now:
        yield (
            f"{checkpoint.folder} was computed with {', '.join(before)} and this run computes with {', '.join(now)}, "
            "so it does not continue bit for bit"
        )
    if changed := order_changes(trainer, checkpoint):
        yield f"the order of the training data may change from here on: {', '.join(changed)}"


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
