"""Flags of reports and profiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.errors import InputError
from megatron.flags import flag
from megatron.reports.log_formats import LOG_FORMATS
from megatron.reports.record import METRICS
from megatron.training.config import PluginConfig, RunConfig

# The flag that makes the other flags of a service apply.
NEEDED = {
    **dict.fromkeys(("wandb_exp_name", "wandb_entity", "wandb_group"), "wandb_project"),
    **dict.fromkeys(("mlflow_run_name", "mlflow_tracking_uri"), "mlflow_experiment"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig(PluginConfig):
    """Format of the log, progress bar, metrics file, TensorBoard, Weights & Biases and MLflow."""

    log_format: str = flag(
        "short",
        "log lines: 'short' is one line for people, 'megatron' that of Megatron-LM v2.5 for scripts that parse it",
        choices=tuple(LOG_FORMATS),
    )
    progress: bool = flag(True, "no progress bar")
    metrics_path: str | None = flag(
        None,
        "append a JSON object per log line, evaluation and sample, in full precision; a resumed run continues the file "
        "(default: metrics.jsonl in --save, if given)",
        metavar="FILE",
    )
    log_params_norm: bool = flag(False, "log the L2 norm of the parameters")
    moe_per_layer_logging: bool = flag(
        False,
        "write the load of the experts, the router's entropy and the auxiliary losses of each layer too, besides their "
        "means over layers",
    )
    tensorboard_dir: str | None = flag(None, "write TensorBoard events to this folder", metavar="DIR")
    tensorboard_log_interval: int = flag(1, "iterations between points in TensorBoard", low=1)
    tensorboard_queue_size: int = flag(
        1000, "maximum number of TensorBoard events kept in memory before a write", low=1
    )
    log_timers_to_tensorboard: bool = flag(
        False,
        "write the timers of --timing-log-level, maximum over ranks, to TensorBoard and --metrics-path",
    )
    log_memory_to_tensorboard: bool = flag(
        False,
        "write bytes of allocated and reserved memory, maximum over ranks, to TensorBoard and --metrics-path",
    )
    wandb_project: str | None = flag(None, "log to this Weights & Biases project", metavar="NAME")
    wandb_exp_name: str | None = flag(None, "name of the run in Weights & Biases", metavar="NAME")
    wandb_entity: str | None = flag(
        None, "team or user that owns the Weights & Biases project", metavar="NAME"
    )
    wandb_group: str | None = flag(
        None, "group of runs in Weights & Biases that this one belongs to", metavar="NAME"
    )
    mlflow_experiment: str | None = flag(None, "log to this MLflow experiment", metavar="NAME")
    mlflow_run_name: str | None = flag(None, "name of the run in MLflow", metavar="NAME")
    mlflow_tracking_uri: str | None = flag(
        None,
        "MLflow's server or database (default: the environment variable MLFLOW_TRACKING_URI, or else "
        "sqlite:///mlflow.db)",
        metavar="URI",
    )

    def metrics_file(self, run: RunConfig) -> Path | None:
        """The file of metrics, if the run has one."""
        if self.metrics_path is not None:
            return Path(self.metrics_path)
        if run.checkpoint.save is None or run.training.skip_train:
            return None
        return Path(run.checkpoint.save) / METRICS

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, needed in NEEDED.items():
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise InputError(f"--{name.replace('_', '-')} needs --{needed.replace('_', '-')}")

    def check(self, run: RunConfig) -> None:
        if self.moe_per_layer_logging and run.model.num_experts is None:
            raise InputError("--moe-per-layer-logging needs --num-experts")

    @classmethod
    def without_effect(cls, values: Mapping[str, Any]) -> list[str]:
        if values.get("log_timers_to_tensorboard") and not values.get("timing_log_level"):
            return [
                "--log-timers-to-tensorboard has no effect: --timing-log-level is 0, so there are no timers"
            ]
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimingConfig(PluginConfig):
    """Timers of the phases of an iteration."""

    timing_log_level: int = flag(
        0,
        "timers to log: 0 is only the time per iteration, 1 adds the phases of an iteration, 2 adds forward and "
        "backward of each microbatch",
        low=0,
        high=2,
    )
    timing_log_option: str = flag(
        "minmax",
        "times to log: the maximum over ranks, minimum and maximum, or those of all ranks",
        choices=("max", "minmax", "all"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig(PluginConfig):
    """Traces of some iterations."""

    profile: bool = flag(
        False,
        "trace some iterations with torch.profiler; write traces and a summary to the folder profile/ of "
        "--tensorboard-dir, or else of --save",
    )
    profile_step_start: int = flag(10, "last iteration before the profiled ones", low=0)
    profile_step_end: int = flag(12, "last iteration to profile", low=1)
    profile_ranks: tuple[int, ...] = flag(
        (0,), "ranks to profile (default: 0)", low=0, nargs="+", metavar="N"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profile and self.profile_step_end <= self.profile_step_start:
            raise InputError(
                f"--profile-step-end: {self.profile_step_end} must be greater than --profile-step-start "
                f"{self.profile_step_start}"
            )

    def check(self, run: RunConfig) -> None:
        if self.profile and run.plugin(ReportConfig).tensorboard_dir is None and run.checkpoint.save is None:
            raise InputError("--profile needs --tensorboard-dir or --save, the folder to write to")

    def check_processes(self, processes: int) -> None:
        beyond = [rank for rank in self.profile_ranks if rank >= processes]
        if self.profile and beyond:
            raise InputError(
                f"--profile-ranks: {beyond[0]} is not a rank of this run; the last of its {processes} is "
                f"{processes - 1}"
            )
