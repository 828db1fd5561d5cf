"""Start of a run: the folder to save to, the checkpoint to continue from, and its state."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import TextIO

from megatron.checkpoint.checkpoint import Checkpoint, check_architecture, check_vocabulary
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.load import load_into, load_shared
from megatron.checkpoint.storage import lock, newest_iteration, roll_back, rolled_back_to
from megatron.errors import InputError
from megatron.optim.schedule import Schedule
from megatron.parallel.collectives import all_equal, raise_on_all_ranks
from megatron.parallel.mesh import Mesh
from megatron.parallel.random import stable_hash
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import RunConfig
from megatron.training.loop import Trainer
from megatron.training.report import History
from megatron.training.state import TrainState
from megatron.training.task import InitFrom, Task

logger = logging.getLogger("megatron")

# Flags that decide which training samples come next, by the section of the configuration.
ORDER_FLAGS = {
    "training": ("seed",),
    "data": (
        "data_path",
        "train_data_path",
        "split",
        "seq_length",
        "data_order",
        "dataloader_type",
        "mock_data",
        "mask_prob",
        "short_seq_prob",
    ),
}


def claim_folder(config: CheckpointConfig, mesh: Mesh) -> TextIO | None:
    """Check that `--save` can be written to, and lock it against other runs until the returned file is closed."""
    if config.save is None:
        return None
    root = Path(config.save)
    if root.exists() and not root.is_dir():
        raise InputError(f"--save: {root} is not a folder; name one that is, or that is still to be made")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--save: {root}: {error.strerror}") from None
    if not os.access(root, os.W_OK | os.X_OK):
        raise InputError(f"--save: {root} cannot be written to")
    done = newest_iteration(root)
    if done is not None and not (_continues(config) and not config.finetune):
        raise InputError(
            f"--save: {root} already holds a run, at iteration {done}; "
            f"continue it with --load {root} and without --finetune, or choose another folder"
        )
    return lock(root) if mesh.is_first else None


def _continues(config: CheckpointConfig) -> bool:
    """True if the run saves to the folder it loads from."""
    folders = (config.load, config.save)
    return None not in folders and len({Path(folder).resolve() for folder in folders if folder}) == 1


def find_start(config: CheckpointConfig, mesh: Mesh, *, weights_only: bool) -> Checkpoint | None:
    """Find the checkpoint to start from, if any. Every process must call it.

    Args:
        weights_only: the run needs nothing of it but weights (--skip-train).

    Raises:
        InputError: there is none where the flags need one, it lacks what the run needs, or the processes find
            different ones.
    """
    if weights_only and config.load is None:
        raise InputError("--skip-train needs --load, the checkpoint to evaluate")
    if config.finetune and config.load is None:
        raise InputError("--finetune needs --load, the checkpoint whose weights it starts from")
    found = None if config.load is None else _find(config, config.load, mesh, weights_only=weights_only)
    if not all_equal(-1 if found is None else stable_hash(json.dumps(found.state), bits=32), mesh.world):
        raise InputError(
            f"--load: the processes do not find the same checkpoint in {config.load}; every machine must see the same "
            "folder"
        )
    return found


def _find(config: CheckpointConfig, load: str, mesh: Mesh, *, weights_only: bool) -> Checkpoint | None:
    save, step, root = None if config.finetune else config.save, config.ckpt_step, Path(load)
    continues = save is not None and _continues(config)
    if continues and step is not None and rolled_back_to(root) == step:
        step = (
            None  # an earlier start of the same command has rolled back already, and has come further since
        )
    found = find_checkpoint(load, save, step=step, verify=config.verify_checkpoint or None, world=mesh.world)
    if found is not None and not found.state["schedule"] and not (config.finetune or weights_only):
        raise InputError(
            f"--load: {found.folder} holds a model without the state of a run (optimizer, schedule, progress); "
            "add --finetune to start from its weights"
        )
    if continues and step is not None:
        with raise_on_all_ranks(mesh.world):
            if mesh.is_first and (kept := roll_back(root, step)):
                logger.info(f"--ckpt-step: later checkpoints are kept as {kept[0]} ({len(kept)} in all)")
    return found


def initial_state(
    config: RunConfig, task: Task, batch_schedule: BatchSchedule, checkpoint: Checkpoint | None
) -> tuple[TrainState, int]:
    """The state that a run starts from, and its last iteration.

    Without a checkpoint, and with --finetune, it starts at iteration 0. The schedule is that of the command line.
    """
    if checkpoint is None or config.checkpoint.finetune:
        iteration = consumed = 0
    else:
        iteration, consumed = checkpoint.iteration, checkpoint.state["consumed_samples"]
    train_iters, train_samples = run_length(config, batch_schedule, iteration, consumed)
    schedule = Schedule.from_config(
        config.optimizer, global_batch_size=batch_schedule.global_batch_size, train_samples=train_samples
    )
    state = TrainState(history=History(task.loss_names, []), schedule=schedule, train_samples=train_samples)
    if checkpoint is not None and not config.checkpoint.finetune:
        try:
            state.load_progress(checkpoint.state)
        except InputError as error:
            raise InputError(f"{checkpoint.folder / 'state.json'}: {error}") from None
        if iteration > 0:
            # The order of the data depends on how many samples were asked for.
            state.train_samples = max(train_samples, checkpoint.state["train_samples"])
    return state, train_iters


def run_length(
    config: RunConfig, batch_schedule: BatchSchedule, iteration: int, consumed: int
) -> tuple[int, int]:
    """Iteration and number of samples at which a run ends that stands at `iteration`, `consumed` samples."""
    training = config.training
    if training.train_samples is not None:
        return iteration + batch_schedule.iterations(training.train_samples, consumed), training.train_samples
    assert training.train_iters is not None
    left = max(0, training.train_iters - iteration)
    return training.train_iters, consumed + left * batch_schedule.global_batch_size


def load_checkpoint(trainer: Trainer, checkpoint: Checkpoint | None) -> None:
    """Fill weights, optimizer and schedule from a checkpoint, or initialize the weights if there is none.

    With --finetune and --skip-train only weights are loaded.
    """
    config, engine, log = trainer.config, trainer.engine, trainer.reporter.log
    if checkpoint is None:
        engine.buffer.initialize(config.training.seed)
        return
    for fault in checkpoint.passed_over:
        log(f"DAMAGED CHECKPOINT: {fault}; going on from {checkpoint.folder}, an older one")
    for note in checkpoint.notes:
        log(f"--load: {note}")
    init_from = check_model(trainer, checkpoint)
    if init_from is not None:
        engine.buffer.initialize(config.training.seed)
        dropped, new = load_shared(checkpoint, engine.buffer, dropped=init_from.dropped, new=init_from.new)
        log(f"weights of {checkpoint.folder}: not used: {dropped}; initialized at random: {new}")
        return
    weights_only = config.checkpoint.finetune or config.training.skip_train
    with_optimizer = config.checkpoint.load_optim and not weights_only
    load_into(checkpoint, engine.buffer, engine.optimizer if with_optimizer else None)
    save = config.checkpoint.save
    if save is not None and checkpoint.folder.parent.resolve() == Path(save).resolve():
        trainer.saver.iteration = trainer.state.iteration
    if weights_only:
        return
    engine.load_state_dict(checkpoint.state)
    load_schedule(trainer, checkpoint)
    before, now = checkpoint.state.get("operations"), engine.ops.kinds
    if before is not None and tuple(before) != now:
        log(
            f"note: {checkpoint.folder} was computed with {', '.join(before)} and this run computes with "
            f"{', '.join(now)}, so it does not continue bit for bit"
        )
    changed = order_changes(trainer, checkpoint)
    if changed:
        log(f"note: the order of the training data may change from here on: {', '.join(changed)}")


def load_schedule(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Take the checkpoint's schedule with --use-checkpoint-opt_param-scheduler, and note where the two differ."""
    try:
        saved = Schedule(**checkpoint.state["schedule"])
    except TypeError:
        raise InputError(f"{checkpoint.folder / 'state.json'}: 'schedule' is not a schedule") from None
    schedule = trainer.state.schedule
    if saved == schedule:
        return
    keeps = trainer.config.optimizer.use_checkpoint_opt_param_scheduler
    trainer.reporter.log(
        f"note: the schedule of learning rate and weight decay differs from the checkpoint's "
        f"({', '.join(saved.differences(schedule))}); using that of the {'checkpoint' if keeps else 'command line'}"
    )
    trainer.state.schedule = saved if keeps else schedule


def check_model(trainer: Trainer, checkpoint: Checkpoint) -> InitFrom | None:
    """Check that a run can start from the model of a checkpoint. Returns how, if it is another task's model.

    Raises:
        InputError: it is another model.
    """
    config, state, task = trainer.config, checkpoint.state, trainer.task
    check_architecture(checkpoint, config.model)
    init_from = task.init_from if state["task"] != task.name else None
    related = init_from is not None and state["task"] in init_from.tasks and config.checkpoint.finetune
    if state["task"] != task.name and not related:
        raise InputError(f"--load: {checkpoint.folder} holds a {state['task']}, not a {task.name}")
    check_vocabulary(checkpoint, trainer.tokenizer.vocab_size)
    if not config.model.mask_padded_vocab and state["padded_vocab_size"] != trainer.padded_vocab_size:
        raise InputError(
            f"--no-mask-padded-vocab: the padding of the vocabulary is part of the model; {checkpoint.folder} pads it "
            f"to {state['padded_vocab_size']} and this run to {trainer.padded_vocab_size}; change "
            "--make-vocab-size-divisible-by, or --tensor-model-parallel-size which it is multiplied by"
        )
    return init_from


def order_changes(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """Flags that decide which samples come next and differ from the run that saved a checkpoint."""
    now, saved = dataclasses.asdict(trainer.config), checkpoint.state["config"]
    changed = []
    for section, names in ORDER_FLAGS.items():
        for name in names:
            # A checkpoint from before a flag existed has the flag's default.
            default = getattr(type(getattr(trainer.config, section)), name)
            before, after = saved.get(section, {}).get(name, default), now[section][name]
            after = list(after) if isinstance(after, tuple) else after
            if name in ("data_path", "train_data_path") and _file_names(before) == _file_names(after):
                continue  # the same files in another folder
            if before != after:
                changed.append(f"--{name.replace('_', '-')} changed from {before} to {after}")
    before, after = checkpoint.state["train_samples"], trainer.state.train_samples
    if before != after:
        changed.append(f"the number of samples in all changed from {before} to {after}")
    return changed


def _file_names(paths: list[str] | None) -> list[str]:
    """Names of a data flag's files, without folders."""
    return [Path(path).name for path in paths or ()]
