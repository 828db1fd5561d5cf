"""Sets a run up from its configuration, and runs it."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

import torch

from megatron.checkpoint.checkpoint import (
    Checkpoint,
    check_architecture,
    check_vocabulary,
)
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.load import load_into, load_shared
from megatron.checkpoint.saver import Saver
from megatron.checkpoint.storage import lock, newest_iteration, take_back, taken_back
from megatron.data.loader import start_fork_server
from megatron.flags import InputError
from megatron.ops.memory import keep_freed_memory
from megatron.optim.schedule import Schedule
from megatron.parallel.collectives import all_equal, together
from megatron.parallel.mesh import Mesh, choose_device, init_mesh, world_size
from megatron.parallel.random import key
from megatron.tokenizer import build_tokenizer, padded_vocab_size
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import RunConfig, TrainingConfig
from megatron.training.devices import find_peak
from megatron.training.engine import Engine
from megatron.training.eval_tasks import read_eval_tasks
from megatron.training.layout import check_layout, check_same_everywhere, describe_layout
from megatron.training.loop import Progress, Trainer, manual_gc
from megatron.training.report import History, Reporter, show_log
from megatron.training.stop import StopRequests
from megatron.training.task import Relation, Task
from megatron.training.watchdog import Watchdog

logger = logging.getLogger("megatron")


def pretrain(config: RunConfig, task: Task, trainer: Callable[..., Trainer] = Trainer) -> int:
    """Train `task` as configured, as one of torchrun's processes or alone, by a `trainer`.

    Returns:
        The status to exit with: 0 when training came to its end or stopped where a flag said so; 130, 138 or 143
        when SIGINT, SIGUSR1 or SIGTERM ended it.

    Raises:
        InputError: the configuration does not fit what it names: files, checkpoints, devices, processes.
        TrainingFault: numbers have become useless, a checkpoint cannot be written, or a process is gone.
    """
    if config.dry_run.dry_run:
        # Imported here, for it takes seconds.
        from megatron.training.dry_run import dry_run

        return dry_run(config, task)
    check_layout(config, world_size())
    if config.data.num_workers:
        start_fork_server(__name__)
    device = choose_device(config.training.device)
    if device.type == "cpu":
        keep_freed_memory()
    with init_mesh(config.parallel, device, functools.partial(check_same_everywhere, config)) as mesh:
        show_log(mesh)
        stop = StopRequests(config.training, mesh)
        with together(mesh.world, InputError):
            claim = claim_folder(config.checkpoint, mesh)
        checkpoint = find_start(config.checkpoint, mesh, weights_alone=config.training.skip_train)
        found = -1 if checkpoint is None else key(json.dumps(checkpoint.state), bits=32)
        if not all_equal(found, mesh.world):
            raise InputError(
                f"--load: the processes do not find the same checkpoint in {config.checkpoint.load}; every machine "
                "must see the same folder"
            )
        reporter = Reporter(config.logging, mesh, settings=dataclasses.asdict(config))
        try:
            built = build_trainer(trainer, config, task, mesh, reporter, checkpoint)
            begin(built, checkpoint)
            return run(built, stop)
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
            if claim is not None:
                claim.close()


def claim_folder(config: CheckpointConfig, mesh: Mesh) -> TextIO | None:
    """Make sure that `--save` can be written to, by no other run; the claim lasts until the file is closed."""
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
    continues = config.load is not None and Path(config.load).resolve() == root.resolve()
    done = newest_iteration(root)
    if done is not None and not (continues and not config.finetune):
        raise InputError(
            f"--save: {root} already holds a run, at iteration {done}; "
            f"continue it with --load {root} and without --finetune, or choose another folder"
        )
    return lock(root) if mesh.is_first else None


def find_start(config: CheckpointConfig, mesh: Mesh, *, weights_alone: bool) -> Checkpoint | None:
    """The checkpoint to start from, if any; `weights_alone` where nothing else of it is needed. Every process must
    take part."""
    if weights_alone and config.load is None:
        raise InputError("--skip-train needs --load, the checkpoint that is to be evaluated")
    if config.finetune and config.load is None:
        raise InputError("--finetune needs --load, the checkpoint whose weights it starts from")
    if config.load is None:
        return None
    save = None if config.finetune else config.save
    step, root = config.ckpt_step, Path(config.load)
    continues = save is not None and Path(save).resolve() == root.resolve()
    if continues and step is not None and taken_back(root) == step:
        step = None  # by an earlier try of the same command, which has come further since
    found = find_checkpoint(
        config.load, save, step=step, verify=config.verify_checkpoint or None, world=mesh.world
    )
    if found is not None and not found.state["schedule"] and not (config.finetune or weights_alone):
        raise InputError(
            f"--load: {found.folder} holds a model without the state of a run (optimizer, schedule, progress); "
            "add --finetune to start from its weights"
        )
    if continues and step is not None:
        with together(mesh.world):
            if mesh.is_first and (kept := take_back(root, step)):
                logger.info(f"--ckpt-step: later checkpoints are kept as {kept[0]} ({len(kept)} in all)")
    return found


def build_trainer(
    kind: Callable[..., Trainer],
    config: RunConfig,
    task: Task,
    mesh: Mesh,
    reporter: Reporter,
    checkpoint: Checkpoint | None,
) -> Trainer:
    """Everything that a run consists of, at the iteration of `checkpoint`; weights have no values yet."""
    training = config.training
    tokenizer = build_tokenizer(config.tokenizer)
    padded = padded_vocab_size(
        tokenizer.vocab_size, config.tokenizer.make_vocab_size_divisible_by, mesh.tp.size
    )
    batch_schedule = BatchSchedule.from_config(training, mesh.dp.size)
    progress = saved_progress(task, checkpoint, config.checkpoint)
    train_iters, train_samples = run_length(training, batch_schedule, progress)
    batch_size = batch_schedule.global_batch_size
    schedule = Schedule.from_config(
        config.optimizer, global_batch_size=batch_size, train_samples=train_samples
    )
    if checkpoint is not None and progress.iteration > 0:
        # The order of the data depends on how many samples were asked for.
        train_samples = max(train_samples, checkpoint.state["train_samples"])
    eval_samples = training.eval_iters * batch_size
    # As many validation samples as NVIDIA's code asks for: the order of samples depends on the number.
    train_wanted = 0 if training.skip_train else train_samples
    wanted = (train_wanted, (train_iters // training.eval_interval + 1) * eval_samples, eval_samples)
    datasets = task.build_datasets(config, tokenizer, wanted)
    with together(mesh.world, InputError):
        eval_tasks = read_eval_tasks(config, task, tokenizer, reporter.say)

    engine = Engine(config, task, mesh, vocab_size=tokenizer.vocab_size, padded_vocab_size=padded)
    saver = Saver(
        config.checkpoint,
        engine.buffer,
        engine.optimizer,
        tokenizer_files={file.name: file.read_bytes() for file in tokenizer.files},
        say=reporter.say,
    )
    return kind(
        config=config,
        task=task,
        mesh=mesh,
        tokenizer=tokenizer,
        padded_vocab_size=padded,
        engine=engine,
        schedule=schedule,
        batch_schedule=batch_schedule,
        peak=find_peak(mesh, engine.ops.matmul, engine.dtype),
        train_iters=train_iters,
        train_samples=train_samples,
        datasets=datasets,
        eval_tasks=eval_tasks,
        saver=saver,
        reporter=reporter,
        progress=progress,
    )


def run_length(config: TrainingConfig, batch_schedule: BatchSchedule, progress: Progress) -> tuple[int, int]:
    """The iteration and the count of samples at which a run ends."""
    consumed = progress.consumed_samples
    if config.train_samples is not None:
        left = batch_schedule.iterations(config.train_samples, consumed)
        return progress.iteration + left, config.train_samples
    left = max(0, config.train_iters - progress.iteration)
    return config.train_iters, consumed + left * batch_schedule.global_batch_size


def begin(trainer: Trainer, checkpoint: Checkpoint | None) -> None:
    """Give the weights, and what else a checkpoint has, the values that the run begins with."""
    if checkpoint is None:
        trainer.engine.buffer.initialize(trainer.config.training.seed)
        return
    load(trainer, checkpoint)
    save = trainer.config.checkpoint.save
    if save is not None and checkpoint.folder.parent.resolve() == Path(save).resolve():
        trainer.saver.iteration = trainer.progress.iteration


def load(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Fill weights, optimizer, schedule and progress from a checkpoint; with --finetune the weights alone."""
    config, state, say = trainer.config.checkpoint, checkpoint.state, trainer.reporter.say
    for fault in checkpoint.passed_over:
        say(f"DAMAGED CHECKPOINT: {fault}; going on from {checkpoint.folder}, an older one")
    for note in checkpoint.notes:
        say(f"--load: {note}")
    relation = check_model(trainer, checkpoint)
    weights_alone = config.finetune or trainer.config.training.skip_train
    with_optimizer = config.load_optim and not weights_alone
    engine = trainer.engine
    if relation is not None:
        engine.buffer.initialize(trainer.config.training.seed)
        dropped, new = load_shared(checkpoint, engine.buffer, dropped=relation.dropped, new=relation.new)
        say(f"of the weights of {checkpoint.folder}, not used: {dropped}; begun at random: {new}")
        return
    load_into(checkpoint, engine.buffer, engine.optimizer if with_optimizer else None)
    if weights_alone:
        return
    if state["spike_window"] is not None:
        engine.optimizer.gate.load(state["spike_window"])
    # A checkpoint of fp32 or bf16, or from before there was fp16, has none.
    if engine.optimizer.scaler is not None and state.get("loss_scaler") is not None:
        engine.optimizer.scaler.load(state["loss_scaler"])
    try:
        saved = Schedule(**state["schedule"])
    except TypeError:
        raise InputError(f"{checkpoint.folder / 'state.json'}: 'schedule' is not a schedule") from None
    if saved != trainer.schedule:
        keeps = trainer.config.optimizer.use_checkpoint_opt_param_scheduler
        say(
            "learning rate or weight decay is scheduled otherwise by the checkpoint than by the command line; "
            f"going on with the schedule of the {'checkpoint' if keeps else 'command line'}: "
            + ", ".join(saved.differences(trainer.schedule))
        )
        trainer.schedule = saved if keeps else trainer.schedule
    before, now = state.get("operations"), engine.ops.kinds
    if before is not None and tuple(before) != now:
        say(
            f"{checkpoint.folder} was computed by {', '.join(before)}, and this run computes by {', '.join(now)}: from "
            "here on it is not bit for bit the run that it continues"
        )
    changed = order_changes(trainer, checkpoint)
    if changed:
        say(f"from here on the training data may come in another order than before: {', '.join(changed)}")


def check_model(trainer: Trainer, checkpoint: Checkpoint) -> Relation | None:
    """Raise `InputError` unless a run can go on from the model of a checkpoint; gives what relates it to the run's, if
    that is another."""
    config, state, task = trainer.config, checkpoint.state, trainer.task
    check_architecture(checkpoint, config.model)
    relation = task.begins_with if state["task"] != task.name else None
    related = relation is not None and state["task"] in relation.tasks and config.checkpoint.finetune
    if state["task"] != task.name and not related:
        raise InputError(f"--load: {checkpoint.folder} holds a {state['task']}, not a {task.name}")
    check_vocabulary(checkpoint, trainer.tokenizer.vocab_size)
    if not config.model.mask_padded_vocab and state["padded_vocab_size"] != trainer.padded_vocab_size:
        raise InputError(
            f"--no-mask-padded-vocab: the padding of the vocabulary is part of the model; {checkpoint.folder} pads it "
            f"to {state['padded_vocab_size']} and this run to {trainer.padded_vocab_size}; change "
            "--make-vocab-size-divisible-by, or --tensor-model-parallel-size which it is multiplied by"
        )
    return relation


def saved_progress(task: Task, checkpoint: Checkpoint | None, config: CheckpointConfig) -> Progress:
    """Where the run goes on, which without a checkpoint and with --finetune is the beginning."""
    if checkpoint is None or config.finetune:
        return Progress(History(task.loss_names, []))
    state = checkpoint.state
    rows = [{k: math.nan if v is None else v for k, v in row.items()} for row in state["history"]]
    if any(
        not {"iteration", "consumed samples", "grad norm", "skipped", *task.loss_names} <= row.keys()
        for row in rows
    ):
        raise InputError(f"{checkpoint.folder / 'state.json'}: 'history' lacks a loss or the gradient's norm")
    return Progress(
        History(task.loss_names, rows),
        checkpoint.iteration,
        state["consumed_samples"],
        state["evaluation_due"],
        state["bad_steps"],
    )


def order_changes(trainer: Trainer, checkpoint: Checkpoint) -> list[str]:
    """What differs from the run that saved a checkpoint and decides which samples come next."""
    now, saved = dataclasses.asdict(trainer.config), checkpoint.state["config"]
    pairs = [("--seed", "training", "seed")]
    names = (
        "data_path",
        "train_data_path",
        "split",
        "seq_length",
        "data_order",
        "dataloader_type",
        "mock_data",
        "mask_prob",
        "short_seq_prob",
    )
    pairs += [(f"--{name.replace('_', '-')}", "data", name) for name in names]
    changed = []
    for flag, part, name in pairs:
        # A checkpoint from before there was a flag has its default.
        default = getattr(type(getattr(trainer.config, part)), name)
        before, after = saved.get(part, {}).get(name, default), now[part][name]
        after = list(after) if isinstance(after, tuple) else after
        if name in ("data_path", "train_data_path") and _names(before) == _names(after):
            continue  # the files lie elsewhere
        if before != after:
            changed.append(f"{flag} {before} there, {after} here")
    if trainer.train_samples != checkpoint.state["train_samples"]:
        changed.append(
            f"{checkpoint.state['train_samples']} samples in all there, {trainer.train_samples} here"
        )
    return changed


def _names(paths: list[str] | None) -> list[str]:
    """Of what a data flag holds, paths and weights, all but folders."""
    return [Path(path).name for path in paths or ()]


def describe(trainer: Trainer) -> str:
    """What is about to run, in a line."""
    training, mesh, progress = trainer.config.training, trainer.mesh, trainer.progress
    model = (
        f"in {training.precision} on {mesh.device}; vocabulary of {trainer.tokenizer.vocab_size}, "
        f"padded to {trainer.padded_vocab_size}"
    )
    if training.skip_train:
        return f"evaluation {model}; nothing is trained (--skip-train)"
    return (
        f"training {model}; iterations {progress.iteration + 1} to {trainer.train_iters}, learning rate "
        f"{trainer.schedule.lr(progress.consumed_samples):.3E} to begin with"
    )


def run(trainer: Trainer, stop: StopRequests) -> int:
    """Train and evaluate; gives the status to exit with."""
    config, progress, say = trainer.config, trainer.progress, trainer.reporter.say
    done = progress.iteration >= trainer.train_iters
    skips = config.training.skip_train
    if done and not skips:
        say(
            f"{config.checkpoint.load} is at iteration {progress.iteration} of {trainer.train_iters}: "
            f"nothing is left to train; raise {trainer.length_flags} to go on"
        )
        if not progress.evaluation_due and not trainer.evaluates_again:
            return 0
    elif config.checkpoint.load is not None and progress.iteration == 0 and not config.checkpoint.finetune:
        say(f"--load: {config.checkpoint.load} holds no checkpoint yet; training starts from the beginning")
    if config.checkpoint.save is None and not skips:
        say("without --save DIR no checkpoint of this run will be kept")
    say(describe(trainer))
    say(describe_layout(trainer.engine))
    for note in trainer.engine.ops.notes:
        say(note)
    if not done and not skips:
        peak = trainer.peak
        say(
            f"peak of a device in {config.training.precision}: {peak.flops / 1e12:.3g} TFLOP/s ({peak.source})"
        )
    trainer.reporter.start(progress.iteration, trainer.train_iters)
    timeout = config.training.hang_timeout
    with Watchdog(trainer.mesh, timeout) if timeout else nullcontext():
        with stop, trainer.saver, manual_gc(config.training):
            reason = None if done or skips else trainer.train(stop)
        if reason is None:
            trainer.finish()
    if reason is not None:
        kept = (
            f"saved in {config.checkpoint.save}"
            if config.checkpoint.save
            else "nothing saved, without --save"
        )
        say(f"stopped after iteration {progress.iteration} of {trainer.train_iters}: {reason}; {kept}")
    return stop.exit_code
