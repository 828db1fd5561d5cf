"""Start of a run: the folder to save to, the checkpoint to continue from, and its state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from megatron.checkpoint.checkpoint import Checkpoint, check_architecture, check_vocabulary
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.load import load_into
from megatron.checkpoint.storage import lock, newest_iteration
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
from megatron.training.task import Task

# Notes for the log on how a resumed run differs from the one that saved its checkpoint. Filled by `megatron.plugins`.
RESUME_NOTES: list[Callable[[Trainer, Checkpoint], Iterator[str]]] = []


def claim_folder(config: CheckpointConfig, mesh: Mesh) -> TextIO | None:
    """Check that `--save` can be written to, and lock it against other runs until the returned file is closed."""
    if config.save is None:
        return None
    root = Path(config.save)
    if root.exists() and not root.is_dir():
        raise InputError(f"--save: {root} is not a directory; choose an existing directory or a new path")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--save: {root}: {error.strerror}") from None
    if not os.access(root, os.W_OK | os.X_OK):
        raise InputError(
            f"--save: {root} cannot be written to; change its permissions or choose another directory"
        )
    done = newest_iteration(root, exists=False)
    if done is not None and not resumes(config):
        raise InputError(
            f"--save: {root} already holds a run, at iteration {done}; "
            f"continue it with --load {root} and without --finetune, or choose another folder"
        )
    return lock(root) if mesh.is_first else None


def resumes(config: CheckpointConfig) -> bool:
    """True if the run continues the one in the folder that it saves to."""
    if config.load is None or config.save is None or config.finetune:
        return False
    return Path(config.load).resolve() == Path(config.save).resolve()


def find_start(config: CheckpointConfig, mesh: Mesh, *, skip_train: bool) -> Checkpoint | None:
    """Find the checkpoint to start from, if any. Every process must call it.

    Raises:
        InputError: there is none where the flags need one, it lacks what the run needs, or the processes find
            different ones.
    """
    if skip_train and config.load is None:
        raise InputError("--skip-train needs --load, the checkpoint to evaluate")
    if config.finetune and config.load is None:
        raise InputError("--finetune needs --load, the checkpoint whose weights it starts from")
    weights_only, found = config.finetune or skip_train, None
    if config.load is not None:
        found = find_checkpoint(
            config.load,
            None if config.finetune else config.save,
            step=config.ckpt_step,
            verify=config.verify_checkpoint,
            weights_only=weights_only,
            world=mesh.world,
        )
    if found is not None and not found.state.get("schedule") and not weights_only:
        raise InputError(
            f"--load: {found.folder} holds a model without the state of a run (optimizer, schedule, progress); "
            "add --finetune to start from its weights"
        )
    if not all_equal(-1 if found is None else stable_hash(json.dumps(found.state), bits=32), mesh.world):
        raise InputError(
            f"--load: the processes do not find the same checkpoint in {config.load}; every machine must see the same "
            "folder"
        )
    return found


def initial_state(
    config: RunConfig, task: Task, batch_schedule: BatchSchedule, checkpoint: Checkpoint | None
) -> tuple[TrainState, int]:
    """Build the state at the start of a run, with the command line's schedule. Returns it and the last iteration.

    A run starts at the checkpoint's iteration, or at 0 without a checkpoint and with --finetune. `load_checkpoint`
    loads the rest of the checkpoint's state.
    """
    iteration = consumed = 0
    if checkpoint is not None and not config.checkpoint.finetune:
        iteration, consumed = checkpoint.iteration, checkpoint.state["consumed_samples"]
    train_iters, train_samples = run_length(config, batch_schedule, iteration, consumed)
    schedule = Schedule.from_config(
        config.optimizer, global_batch_size=batch_schedule.global_batch_size, train_samples=train_samples
    )
    if checkpoint is not None and iteration > 0:
        # The order of the data depends on the number of samples that the run was started for.
        train_samples = checkpoint.state["train_samples"] or train_samples
    state = TrainState(
        history=History(task.loss_names, []),
        schedule=schedule,
        train_samples=train_samples,
        iteration=iteration,
        consumed_samples=consumed,
    )
    return state, train_iters


def run_length(
    config: RunConfig, batch_schedule: BatchSchedule, iteration: int, consumed: int
) -> tuple[int, int]:
    """The last iteration of a run and its number of samples, given the iterations and samples already done."""
    training = config.training
    if training.train_samples is not None:
        return iteration + batch_schedule.iterations(training.train_samples, consumed), training.train_samples
    assert training.train_iters is not None
    left = max(0, training.train_iters - iteration)
    return training.train_iters, consumed + left * batch_schedule.global_batch_size


def load_checkpoint(trainer: Trainer, checkpoint: Checkpoint | None) -> None:
    """Load weights, optimizer and state of a run from a checkpoint, or initialize the weights if there is none.

    With --finetune and --skip-train only weights are loaded. The schedule stays the command line's unless
    --use-checkpoint-opt_param-scheduler.
    """
    config, engine, log = trainer.config, trainer.engine, trainer.log
    if checkpoint is None:
        engine.buffer.initialize(config.training.seed)
        return
    for fault in checkpoint.passed_over:
        log(f"warning: skipped a damaged checkpoint: {fault}; resuming from the older {checkpoint.folder}")
    for note in checkpoint.notes:
        log(f"--load: {note}")
    check_compatible(trainer, checkpoint)
    weights_only = config.checkpoint.finetune or config.training.skip_train
    with_optimizer = config.checkpoint.load_optim and not weights_only
    with raise_on_all_ranks(trainer.mesh.world, InputError):  # one pipeline stage may lack a tensor
        if checkpoint.state["task"] != trainer.task.name:
            engine.buffer.initialize(config.training.seed)
            log(trainer.task.init_from[checkpoint.state["task"]](checkpoint, engine.buffer))
            return
        load_into(checkpoint, engine.buffer, engine.optimizer if with_optimizer else None)
    if weights_only:
        return
    given = trainer.state.schedule
    try:
        trainer.state.load_state_dict(checkpoint.state, engine.optimizer)
    except InputError as error:
        raise InputError(f"{checkpoint.folder / 'state.json'}: {error}") from None
    if not config.optimizer.use_checkpoint_opt_param_scheduler:
        trainer.state.schedule = given
    for notes in RESUME_NOTES:
        for note in notes(trainer, checkpoint):
            log(f"note: {note}")


def check_compatible(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Raise `InputError` unless the checkpoint's architecture, task and vocabulary fit this run."""
    config, state, task = trainer.config, checkpoint.state, trainer.task
    if rope := check_architecture(checkpoint, config.model, finetune=config.checkpoint.finetune):
        trainer.log(f"note: RoPE differs from that of {checkpoint.folder}: {'; '.join(rope)}")
    if state["task"] != task.name and not (config.checkpoint.finetune and state["task"] in task.init_from):
        raise InputError(f"--load: {checkpoint.folder} holds a {state['task']}, not a {task.name}")
    check_vocabulary(checkpoint, trainer.tokenizer.vocab_size)
    if not config.model.mask_padded_vocab and state["padded_vocab_size"] != trainer.padded_vocab_size:
        raise InputError(
            f"--no-mask-padded-vocab: the padding of the vocabulary is part of the model; {checkpoint.folder} pads it "
            f"to {state['padded_vocab_size']} and this run to {trainer.padded_vocab_size}; change "
            "--make-vocab-size-divisible-by, or --tensor-model-parallel-size which it is multiplied by"
        )
