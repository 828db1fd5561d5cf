"""Sets a run up from its configuration, and runs it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch

from megatron.checkpoint.checkpoint import Checkpoint, check_architecture, find_checkpoint, load_into
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.storage import newest_iteration
from megatron.data.loader import start_fork_server
from megatron.flags import InputError
from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer
from megatron.optim.schedule import Schedule
from megatron.parallel.mesh import Mesh, choose_device, init_mesh
from megatron.tokenizer import build_tokenizer, padded_vocab_size
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import RunConfig
from megatron.training.costs import check_memory, parameter_count
from megatron.training.loop import Progress, Trainer
from megatron.training.report import History, Reporter, show_log
from megatron.training.stop import StopRequests
from megatron.training.task import Task


def pretrain(config: RunConfig, task: Task) -> int:
    """Train `task` as configured, as one of torchrun's processes or alone.

    Returns:
        The status to exit with: 0 when training came to its end or stopped where a flag said so; 130 or 143
        when SIGINT or SIGTERM ended it.

    Raises:
        InputError: the configuration does not fit what it names: files, checkpoints, devices, processes.
        TrainingFault: gradients have become useless.
    """
    if config.data.num_workers:
        start_fork_server()
    device = choose_device(config.training.device)
    with init_mesh(config.parallel, device) as mesh:
        show_log(mesh)
        stop = StopRequests(config.training, mesh)
        checkpoint = find_start(config.checkpoint)
        reporter = Reporter(config.logging, mesh, settings=dataclasses.asdict(config))
        try:
            return run(build_trainer(config, task, mesh, reporter, checkpoint), stop)
        except RuntimeError as error:
            # A CPU's allocator has no exception of its own.
            if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
                raise InputError(
                    f"{device} has too little memory for this run; lower --micro-batch-size "
                    f"{config.training.micro_batch_size}, --seq-length {config.data.seq_length} or the model's size"
                ) from error
            raise
        finally:
            reporter.close()


def find_start(config: CheckpointConfig) -> Checkpoint | None:
    """The checkpoint to start from, if any, after making sure that `--save` can be written to."""
    if config.save is not None:
        root = Path(config.save)
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--save: {root}: {error.strerror}") from None
        if not os.access(root, os.W_OK | os.X_OK):
            raise InputError(f"--save: {root} cannot be written to")
        continues = config.load is not None and Path(config.load).resolve() == root.resolve()
        done = newest_iteration(root)
        if done is not None and not (continues and not config.finetune):
            raise InputError(
                f"--save: {root} already holds a run, at iteration {done}; "
                f"continue it with --load {root}, or choose another folder"
            )
    return find_checkpoint(config.load, config.save) if config.load is not None else None


def build_trainer(
    config: RunConfig, task: Task, mesh: Mesh, reporter: Reporter, checkpoint: Checkpoint | None
) -> Trainer:
    """Everything that a run consists of, as it was when `checkpoint` was saved, or at its beginning."""
    training = config.training
    tokenizer = build_tokenizer(config.tokenizer)
    padded = padded_vocab_size(
        tokenizer.vocab_size, config.tokenizer.make_vocab_size_divisible_by, mesh.tp.size
    )
    check_memory(parameter_count(config.model, padded), bf16=training.bf16, device=mesh.device)
    batch_schedule = BatchSchedule(
        global_batch_size=training.global_batch_size or training.micro_batch_size * mesh.dp.size,
        micro_batch_size=training.micro_batch_size,
        data_parallel_size=mesh.dp.size,
        rampup=training.rampup_batch_size,
    )
    batch_size = batch_schedule.global_batch_size
    train_iters = training.train_iters or batch_schedule.iterations(training.train_samples)
    train_samples = training.train_samples or train_iters * batch_size
    schedule = Schedule.from_config(
        config.optimizer, global_batch_size=batch_size, train_samples=train_samples
    )
    eval_samples = training.eval_iters * batch_size
    # As many validation samples as NVIDIA's code asks for: the order of samples depends on the number.
    wanted = (train_samples, (train_iters // training.eval_interval + 1) * eval_samples, eval_samples)
    named = zip(("train", "validation", "test"), task.build_datasets(config, tokenizer, wanted), strict=True)
    datasets = {name: dataset for name, dataset in named if dataset is not None}
    if "train" not in datasets:
        raise InputError(f"--split: {config.data.split} leaves no documents to train on")

    model = task.build_model(config, tokenizer.vocab_size, padded)
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    buffer = ParamBuffer(model, dtype=dtype, device=mesh.device)
    trainer = Trainer(
        config=config,
        task=task,
        mesh=mesh,
        tokenizer=tokenizer,
        padded_vocab_size=padded,
        model=model,
        buffer=buffer,
        optimizer=Optimizer(buffer, config.optimizer),
        schedule=schedule,
        batch_schedule=batch_schedule,
        train_iters=train_iters,
        datasets=datasets,
        reporter=reporter,
        progress=Progress(0, 0, History(task.loss_names, [])),
    )
    if checkpoint is None:
        buffer.initialize(training.seed)
    else:
        load(trainer, checkpoint)
    return trainer


def load(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Fill weights, optimizer, schedule and progress from a checkpoint; with --finetune the weights alone."""
    config, state = trainer.config.checkpoint, checkpoint.state
    check_architecture(checkpoint, trainer.config.model)
    if state["vocab_size"] != trainer.tokenizer.vocab_size:
        raise InputError(
            f"--load: {checkpoint.folder} has a vocabulary of {state['vocab_size']} ids, but the tokenizer has "
            f"{trainer.tokenizer.vocab_size}; give the tokenizer that the checkpoint was trained with"
        )
    with_optimizer = config.load_optim and not config.finetune
    load_into(checkpoint, trainer.buffer, trainer.optimizer if with_optimizer else None)
    if config.finetune:
        return
    trainer.progress = Progress(
        checkpoint.iteration,
        state["consumed_samples"],
        History(trainer.task.loss_names, state["history"]),
    )
    saved = Schedule(**state["schedule"])
    if saved != trainer.schedule:
        keeps = trainer.config.optimizer.use_checkpoint_opt_param_scheduler
        trainer.reporter.say(
            "learning rate or weight decay is scheduled otherwise by the checkpoint than by the command line; "
            f"going on with the schedule of the {'checkpoint' if keeps else 'command line'}: "
            + ", ".join(saved.differences(trainer.schedule))
        )
        trainer.schedule = saved if keeps else trainer.schedule


def describe(trainer: Trainer) -> str:
    """What is about to run, in a line."""
    training, mesh, progress = trainer.config.training, trainer.mesh, trainer.progress
    replicas = f" on each of {mesh.dp.size} data-parallel replicas" if mesh.dp.size > 1 else ""
    return (
        f"{trainer.buffer.num_elements:,} parameters in {'bf16' if training.bf16 else 'fp32'} on "
        f"{mesh.device}{replicas}; vocabulary of {trainer.tokenizer.vocab_size}, padded to "
        f"{trainer.padded_vocab_size}; iterations {progress.iteration + 1} to {trainer.train_iters}, "
        f"learning rate {trainer.schedule.lr(progress.consumed_samples):.3E} to begin with"
    )


def run(trainer: Trainer, stop: StopRequests) -> int:
    """Train and evaluate; gives the status to exit with."""
    config, progress, say = trainer.config, trainer.progress, trainer.reporter.say
    if progress.iteration >= trainer.train_iters:
        say(
            f"{config.checkpoint.load} is at iteration {progress.iteration} of {trainer.train_iters}: "
            "nothing is left to train; raise --train-iters to go on"
        )
        return 0
    if config.checkpoint.load is not None and progress.iteration == 0 and not config.checkpoint.finetune:
        say(f"--load: {config.checkpoint.load} holds no checkpoint yet; training starts from the beginning")
    say(describe(trainer))
    trainer.reporter.start(progress.iteration, trainer.train_iters)
    with stop:
        reason = trainer.train(stop)
    if reason is not None:
        kept = (
            f"saved in {config.checkpoint.save}"
            if config.checkpoint.save
            else "nothing saved, without --save"
        )
        say(f"stopped after iteration {progress.iteration} of {trainer.train_iters}: {reason}; {kept}")
        return stop.exit_code
    trainer.evaluate("validation", "the end of training for val data")
    trainer.evaluate("test", "the end of training for test data")
    return 0
