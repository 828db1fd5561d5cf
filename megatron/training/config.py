"""Flags of the training loop and of its log, and the configuration of a whole run."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from megatron.checkpoint.config import CheckpointConfig
from megatron.data.config import DataConfig
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.model.config import ModelConfig
from megatron.ops.config import OpsConfig
from megatron.optim.config import OptimizerConfig
from megatron.parallel.config import ParallelConfig
from megatron.tokenizer.config import TokenizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """Length, batch sizes, device and precision of a run."""

    micro_batch_size: int = flag(None, "samples per microbatch of one model replica", low=1, required=True)
    global_batch_size: int | None = flag(
        None,
        "samples per optimizer step, over all replicas (default: one microbatch per replica)",
        low=1,
        high=10**7,
    )
    train_iters: int | None = flag(
        None, "iterations to train for; this flag or another --train-... length is required", low=1
    )
    train_samples: int | None = flag(None, "samples to train for, instead of --train-iters", low=1)
    eval_interval: int = flag(1000, "iterations between evaluations", low=1)
    eval_iters: int = flag(100, "global batches per evaluation; 0 disables evaluation", low=0)
    skip_train: bool = flag(False, "evaluate the checkpoint of --load and exit without training")
    seed: int = flag(1234, "seed of initial weights, data order and dropout", low=0, high=2**32 - 1)
    device: str = flag(
        "auto", "device to train on; 'auto': a GPU if there is one", choices=("auto", "cpu", "cuda")
    )
    fp16: bool = flag(
        False, "compute in fp16 with loss scaling, and with fp32 master weights and gradient accumulation"
    )
    bf16: bool = flag(False, "compute in bfloat16 with fp32 master weights and gradient accumulation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp16 and self.bf16:
            raise InputError("--fp16 and --bf16 exclude each other; leave one of them out")
        if self.train_iters is not None and self.train_samples is not None:
            raise InputError("--train-iters and --train-samples exclude each other; leave one of them out")

    @property
    def precision(self) -> str:
        """Precision of the computation: "fp32", "fp16" or "bf16"."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig(Config):
    """Log lines."""

    log_interval: int = flag(100, "iterations between lines of the log", low=1)
    log_level: str = flag(
        "info",
        "detail of the log: 'debug' adds operations, layout, data of each file, peak throughput and memory",
        choices=("info", "debug"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PluginConfig(Config):
    """A section of the configuration that a plug-in adds."""

    def check(self, run: RunConfig) -> None:
        """Check the combination with other sections. Raises `InputError`."""

    def check_processes(self, processes: int) -> None:
        """Check values against the run's number of processes. Raises `InputError`."""

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> list[str]:
        """Notes on flags of the section that have no effect. `values` has those of all flags given, by field."""
        return []


# Sections of the configuration that plug-ins add, by title. Filled by `megatron.plugins`.
PLUGIN_CONFIGS: dict[str, type[PluginConfig]] = {}

C = TypeVar("C", bound=PluginConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration of a training run. `megatron.arguments` makes and checks it.

    Attributes:
        plugins: the sections of `PLUGIN_CONFIGS`.
    """

    training: TrainingConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    model: ModelConfig
    ops: OpsConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    plugins: dict[str, PluginConfig] = dataclasses.field(default_factory=dict)

    def plugin(self, kind: type[C]) -> C:
        """The section of a plug-in, by its class."""
        return next(config for config in self.plugins.values() if isinstance(config, kind))

    @property
    def sections(self) -> list[Config]:
        """All sections, with those of plug-ins."""
        core = [getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "plugins"]
        return [*core, *self.plugins.values()]

    @staticmethod
    def section_types() -> dict[str, type[Config]]:
        """The class of each section, by its field or, for a plug-in, its title."""
        hints = typing.get_type_hints(RunConfig)
        return {name: kind for name, kind in hints.items() if name != "plugins"} | PLUGIN_CONFIGS
