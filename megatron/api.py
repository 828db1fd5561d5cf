"""Python interface: train with configuration objects in place of flags, in a script or a notebook.

    from megatron.api import GPT, DataConfig, ModelConfig, OptimizerConfig, TokenizerConfig, TrainingConfig, train

    run = train(
        GPT,
        ModelConfig(num_layers=4, hidden_size=256, num_attention_heads=8, max_position_embeddings=256),
        DataConfig(data_path=["my/corpus_text_document"], seq_length=256),
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="my/tokenizer"),
        TrainingConfig(micro_batch_size=8, train_iters=200),
        OptimizerConfig(lr=1e-3),
    )
    run.losses, run.model

A configuration object has the flags of a section of docs/flags.md as fields: `num_layers` is `--num-layers`, and errors
name the flag. A program of your own with all flags on its command line calls `main` instead.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron import plugins
from megatron.arguments import AFTER_COMMAND_LINE, parse_run_config, run_config
from megatron.checkpoint.config import CheckpointConfig
from megatron.cli import run_command
from megatron.data.batch import Batch
from megatron.data.config import DataConfig
from megatron.data.dataset import Dataset
from megatron.data.gpt_dataset import GPTBatch, GPTSamples
from megatron.errors import InputError, TrainingFault
from megatron.evaluation.config import EvalTasksConfig
from megatron.faults.config import FaultsConfig
from megatron.faults.watchdog import HangDetection
from megatron.flags import Config
from megatron.inference.config import SampleTextsConfig
from megatron.interop.nvidia.loss_mean import LossMeanConfig
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.ops.config import OpsConfig
from megatron.ops.cpu.malloc import return_freed_memory
from megatron.optim.config import OptimizerConfig
from megatron.optim.schedule import Schedule
from megatron.parallel.config import ParallelConfig
from megatron.parallel.parameters import normal, ones, parameter, zeros
from megatron.parallel.stages import Chunk
from megatron.performance.config import Fp8Config, OffloadConfig, PerformanceConfig
from megatron.planner.config import DryRunConfig
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import GPT
from megatron.recipes.config import (
    ExitConfig,
    FreezeConfig,
    LossScaleConfig,
    RampUpConfig,
    RetentionConfig,
    SaveBestConfig,
    SpikeConfig,
)
from megatron.recipes.length import LengthConfig
from megatron.reports.config import ProfileConfig, ReportConfig, TimingConfig
from megatron.settings.config import SettingsConfig
from megatron.settings.data_tokenizer import DataTokenizerConfig
from megatron.settings.shorthands import ShorthandConfig
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.training.config import LoggingConfig, RunConfig, TrainingConfig
from megatron.training.loop import Hook, Trainer
from megatron.training.report import EvalResult
from megatron.training.task import EvalMetric, Task
from megatron.variants.auto_schedule import AutoScheduleConfig
from megatron.verify.config import CaptureConfig

__all__ = [
    "GPT",
    "AutoScheduleConfig",
    "Batch",
    "CaptureConfig",
    "CheckpointConfig",
    "Chunk",
    "DataConfig",
    "DataTokenizerConfig",
    "Dataset",
    "EvalMetric",
    "EvalTasksConfig",
    "ExitConfig",
    "FaultsConfig",
    "Fp8Config",
    "FreezeConfig",
    "GPTBatch",
    "GPTSamples",
    "Hook",
    "InputError",
    "LengthConfig",
    "LoggingConfig",
    "LossMeanConfig",
    "LossScaleConfig",
    "ModelConfig",
    "ModelContext",
    "OffloadConfig",
    "OpsConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PerformanceConfig",
    "ProfileConfig",
    "RampUpConfig",
    "ReportConfig",
    "RetentionConfig",
    "Run",
    "RunConfig",
    "SampleTextsConfig",
    "SaveBestConfig",
    "Schedule",
    "SettingsConfig",
    "ShorthandConfig",
    "SpikeConfig",
    "Task",
    "TimingConfig",
    "Tokenizer",
    "TokenizerConfig",
    "Trainer",
    "TrainingConfig",
    "TrainingFault",
    "bert",
    "configure",
    "main",
    "normal",
    "ones",
    "parameter",
    "train",
    "zeros",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has ended.

    Attributes:
        modules: the chunks of the model on this process: one, the whole model, unless there is a pipeline.
        iterations: for each iteration "iteration", "consumed samples", "grad norm", and each loss by its name. A
            resumed run has those since it resumed.
        evaluations: for each evaluation "iteration" and its values by name, such as "lm loss validation".
        stop_reason: reason for stopping before the last iteration; None if training came to its end.
    """

    config: RunConfig
    task: Task[Any]
    tokenizer: Tokenizer
    modules: list[nn.Module]
    iterations: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    stop_reason: str | None

    @property
    def model(self) -> nn.Module:
        """The model, or with a pipeline the first chunk of this process's stage."""
        return self.modules[0]

    @property
    def losses(self) -> list[float]:
        """Training loss of each iteration, the weighted sum of the task's terms."""
        return [self.task.total_loss(row) for row in self.iterations]


def configure(*configs: Config) -> RunConfig:
    """Build the configuration of a run from those of its sections. A section that is not given has its defaults.

    Raises:
        InputError: a section is given twice, a required value is missing, or a combination of values is wrong.
    """
    known = RunConfig.section_types().values()
    values: dict[str, Any] = {"notices": []}
    for config in configs:
        if type(config) not in known:
            raise InputError(f"{type(config).__name__} is not a section of a run's configuration")
        if sum(type(other) is type(config) for other in configs) > 1:
            raise InputError(f"{type(config).__name__} is given twice; give it once, with all its fields")
        # As on a command line, a value that equals the default counts as not given.
        fields = [field for field in dataclasses.fields(config) if "flag" in field.metadata]
        values |= {f.name: value for f in fields if (value := getattr(config, f.name)) != f.default}
    for change in AFTER_COMMAND_LINE:
        values = change(values)
    for notice in values.pop("notices"):
        print(f"note: {notice}", file=sys.stderr)
    return run_config(values)


def train(task: Task[Any], *configs: Config, hooks: Sequence[Hook] = ()) -> Run:
    """Train `task`, such as `GPT`, and return the trained model and its losses.

    Ctrl-C, or interrupting a notebook's kernel, ends training after the iteration, and the function returns as usual,
    with `Run.stop_reason` set; a second one raises `KeyboardInterrupt` at once. Afterward the process is as before:
    signal handlers, environment variables, log handlers and process groups are restored, and data loading processes
    have ended. The watchdog (--hang-timeout) is off, since it would end the kernel.

    Args:
        configs: configuration of each section that is not to have its defaults, in any order.
        hooks: called after those of every run.

    Raises:
        InputError: the configuration does not fit, or its files, checkpoints or devices.
        TrainingFault: training cannot continue.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError(
            "train() needs the process's main thread, which alone can handle Ctrl-C; call it there"
        )
    config, recorder = configure(*configs), _Recorder()
    if config.plugin(DryRunConfig).dry_run:
        raise InputError("dry_run: train() trains; count with `megatron pretrain-gpt --dry-run`")
    usual = [hook for hook in plugins.training_hooks() if not isinstance(hook, HangDetection)]
    with _process_restored():
        config, task = plugins.prepared(config, task)
        plugins.train(config, task, [*usual, *hooks, recorder])
    trainer = recorder.trainer
    return Run(
        config=config,
        task=task,
        tokenizer=trainer.tokenizer,
        modules=trainer.engine.modules,
        iterations=recorder.iterations,
        evaluations=recorder.evaluations,
        stop_reason=trainer.stop_reason,
    )


def main(
    task: Task[Any],
    *,
    description: str,
    defaults: Mapping[str, Any] | None = None,
    hooks: Sequence[Hook] = (),
) -> None:
    """Train `task` as a program with the flags of `pretrain_gpt.py`, alone or under torchrun, and exit.

    Args:
        description: first lines of --help.
        defaults: values, by field, that replace the defaults of flags.
        hooks: called after those of every run.
    """

    def command() -> int:
        config = parse_run_config(sys.argv[1:], description=description, defaults=dict(defaults or {}))
        return plugins.run(config, task, hooks)

    run_command(command)


class _Recorder(Hook):
    """Keeps the trainer of a run, and what the run reports."""

    trainer: Trainer

    def __init__(self) -> None:
        self.iterations: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        self.trainer = trainer
        _check_workers(trainer)
        yield

    def after_step(self, trainer: Trainer) -> None:
        if not trainer.goes_on:
            trainer.collect()

    def after_collect(self, trainer: Trainer, rows: list[dict[str, float]]) -> None:
        self.iterations += rows

    def after_evaluation(self, trainer: Trainer, result: EvalResult) -> None:
        self.evaluations.append({"iteration": trainer.state.iteration} | result.values)


def _check_workers(trainer: Trainer) -> None:
    """Check that worker processes can import the classes of the data sets. Raises `InputError`."""
    workers = trainer.config.data.num_workers
    is_notebook = not hasattr(sys.modules["__main__"], "__file__")
    for dataset in trainer.datasets.values() if workers and is_notebook else ():
        if type(dataset).__module__ == "__main__":
            raise InputError(
                f"--num-workers: {workers} worker processes cannot import {type(dataset).__name__}, which is defined "
                "in a notebook; use DataConfig(num_workers=0), or put the class in a file and import it"
            )


@contextmanager
def _process_restored() -> Iterator[None]:
    """Restore what a run changes in its process, beside the signal handlers, which it restores itself."""
    logger, environment = logging.getLogger("megatron"), dict(os.environ)
    handlers, level, threads = logger.handlers, logger.level, torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    before = _recompile_limit()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server_ran = server._forkserver_pid is not None
    try:
        yield
    except InputError:
        # Every rank raises it, so none waits for a communication that another does not join.
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    finally:
        logger.handlers = handlers
        logger.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if before != _recompile_limit():
            config: Any = torch._dynamo.config
            config.recompile_limit = config._config["recompile_limit"].default if before is None else before
        if device is not None:
            torch.cuda.set_device(device)
        if not server_ran:
            server._stop()
        return_freed_memory()


def _recompile_limit() -> int | None:
    """The limit of torch.compile that a run raises; None if torch.compile, which takes seconds to import, is not."""
    config = sys.modules.get("torch._dynamo.config")
    return None if config is None else config.recompile_limit
