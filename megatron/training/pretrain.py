"""Sets up a run from its configuration, and runs it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.save import Saver
from megatron.data.loader import start_fork_server
from megatron.errors import InputError
from megatron.parallel.collectives import raise_on_all_ranks
from megatron.parallel.mesh import Axis, Mesh, choose_device, init_mesh, world_size
from megatron.tokenizer import build_tokenizer, padded_vocab_size
from megatron.training.batch_size import make_batch_schedule
from megatron.training.build import build_engine
from megatron.training.config import RunConfig
from megatron.training.layout import check_layout
from megatron.training.loop import Hook, Trainer
from megatron.training.report import Log, show_log
from megatron.training.start import claim_folder, find_start, initial_state, load_checkpoint, resumes
from megatron.training.stop import StopRequests
from megatron.training.task import Task

logger = logging.getLogger("megatron")

# Checks of the configuration on all processes, which raise `InputError`. Filled by `megatron.plugins`.
START_CHECKS: list[Callable[[RunConfig, Axis], None]] = []


def pretrain(config: RunConfig, task: Task, hooks: Sequence[Hook]) -> int:
    """Train `task` as configured, as one of torchrun's processes or alone.

    Returns:
        The exit status: 0 when training came to its end or stopped where a flag said so; 129, 130, 138 or 143 when
        SIGHUP, SIGINT, SIGUSR1 or SIGTERM ended it.

    Raises:
        InputError: the configuration does not fit its files, checkpoints, devices or processes.
        TrainingFault: training cannot continue, a checkpoint cannot be written, or a process is gone.
    """
    check_layout(config, world_size())
    if config.data.num_workers:
        start_fork_server(__name__)
    device = choose_device(config.training.device)
    if device.type == "cpu":
        from megatron.ops.cpu.malloc import keep_freed_memory

        keep_freed_memory()
    with init_mesh(config.parallel, device, functools.partial(_check_start, config)) as mesh:
        show_log(mesh, config.logging.log_level)
        stop = StopRequests(mesh)
        with raise_on_all_ranks(mesh.world, InputError):
            claim = claim_folder(config.checkpoint, mesh)
        with claim or nullcontext():
            checkpoint = find_start(config.checkpoint, mesh, skip_train=config.training.skip_train)
            trainer = build_trainer(config, task, mesh, checkpoint, hooks)
            load_checkpoint(trainer, checkpoint)
            return run(trainer, stop)


def _check_start(config: RunConfig, world: Axis) -> None:
    for check in START_CHECKS:
        check(config, world)


def build_trainer(
    config: RunConfig, task: Task, mesh: Mesh, checkpoint: Checkpoint | None, hooks: Sequence[Hook]
) -> Trainer:
    """Build everything that a run consists of, in the state of `checkpoint`. Weights have no values yet."""
    log = Log(mesh)
    tokenizer = build_tokenizer(config.tokenizer)
    padded = padded_vocab_size(
        tokenizer.vocab_size, config.tokenizer.make_vocab_size_divisible_by, mesh.tp.size
    )
    batch_schedule = make_batch_schedule(config, mesh.dp.size)
    state, train_iters = initial_state(config, task, batch_schedule, checkpoint)
    eval_samples = config.training.eval_iters * batch_schedule.global_batch_size
    # As many validation samples as NVIDIA's code asks for: their order depends on the number.
    evaluations = train_iters // config.training.eval_interval + 1
    train_samples = 0 if config.training.skip_train else state.train_samples
    datasets = task.build_datasets(
        config, tokenizer, (train_samples, evaluations * eval_samples, eval_samples)
    )
    engine = build_engine(config, task, mesh, vocab_size=tokenizer.vocab_size, padded_vocab_size=padded)
    saver = Saver(
        config.checkpoint,
        engine.buffer,
        engine.optimizer,
        tokenizer_files={file.name: file.read_bytes() for file in tokenizer.files},
        log=log,
        iteration=state.iteration if resumes(config.checkpoint) else 0,
    )
    return Trainer(
        config=config,
        task=task,
        mesh=mesh,
        tokenizer=tokenizer,
        padded_vocab_size=padded,
        engine=engine,
        batch_schedule=batch_schedule,
        train_iters=train_iters,
        datasets=datasets,
        saver=saver,
        log=log,
        state=state,
        hooks=hooks,
    )


def run(trainer: Trainer, stop: StopRequests) -> int:
    """Train and evaluate. Returns the exit status."""
    checkpoint, state, log = trainer.config.checkpoint, trainer.state, trainer.log
    if trainer.is_done and not trainer.config.training.skip_train:
        log(
            f"{checkpoint.load} is at iteration {state.iteration} of {trainer.train_iters}: "
            f"nothing is left to train; raise {trainer.task.length_flags} to go on"
        )
    for note in trainer.engine.ops.notes:
        logger.debug(note)
    trainer.run(stop)
    if trainer.stop_reason is None:
        return 0
    kept = f"saved in {checkpoint.save}" if checkpoint.save else "nothing saved, without --save"
    log(f"stopped after iteration {state.iteration} of {trainer.train_iters}: {trainer.stop_reason}; {kept}")
    return stop.exit_code
