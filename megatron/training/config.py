"""Flags of the training loop, of what it reports, and the bundle of all a run's configuration."""

from __future__ import annotations

import dataclasses

from megatron.checkpoint.config import CheckpointConfig
from megatron.data.config import DataConfig
from megatron.evaluation.config import EvalTasksConfig
from megatron.flags import Config, InputError, flag, flag_name
from megatron.model.config import ModelConfig
from megatron.ops.config import OpsConfig
from megatron.optim.config import OptimizerConfig
from megatron.parallel.config import ParallelConfig
from megatron.tokenizer.config import TokenizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """How long, in what steps, on what device and in what precision."""

    micro_batch_size: int = flag(
        None, "samples that a replica of the model works on at once", low=1, required=True
    )
    global_batch_size: int | None = flag(
        None,
        "samples in one step of the optimizer, on all replicas (default: one microbatch on each)",
        low=1,
        high=10**7,
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "begin with a global batch of START samples and add INCREMENT at a time, to reach --global-batch-size "
        "after SAMPLES samples; with --train-samples",
        low=0,
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
    )
    train_iters: int | None = flag(None, "steps to train for (a run needs this or --train-samples)", low=1)
    train_samples: int | None = flag(
        None, "samples to train for, in place of --train-iters (a run needs one of them)", low=1
    )
    eval_interval: int = flag(1000, "iterations between evaluations", low=1)
    eval_iters: int = flag(100, "global batches in an evaluation; 0 does not evaluate", low=0)
    skip_train: bool = flag(False, "evaluate the checkpoint of --load and leave, training nothing")
    check_weight_replicas_interval: int | None = flag(
        None,
        "iterations between comparisons of the weights that several processes hold alike; ends the run where they "
        "differ",
        low=1,
        aliases=("--check-weight-hash-across-dp-replicas-interval",),
    )
    exit_interval: int | None = flag(None, "save and leave when the iteration is a multiple of this", low=1)
    exit_duration_in_mins: int | None = flag(None, "save and leave after this many minutes", low=1)
    hang_timeout: float = flag(
        540.0,
        "seconds that a process may get nothing done, no microbatch, transfer or file, before the run says where all "
        "processes stand and ends; 0 waits for ever",
        low=0,
        high=10**7,
    )
    cuda_graph: bool = flag(
        False,
        "launch the work of a microbatch as one CUDA graph in place of kernel by kernel, which a GPU would wait for "
        "with a small model; for GPT on one GPU a replica, without dropout",
    )
    manual_gc: bool = flag(
        False,
        "collect Python's garbage when training begins and where --manual-gc-interval says so, not whenever Python "
        "would: on all processes at the same iteration, so that none waits for another that does",
    )
    manual_gc_interval: int = flag(0, "iterations between collections with --manual-gc; 0 for none", low=0)
    manual_gc_eval: bool = flag(True, "with --manual-gc: no collection before and after an evaluation")
    seed: int = flag(1234, "seed of initial weights, order of the data and dropout", low=0, high=2**32 - 1)
    device: str = flag(
        "auto", "where to compute; 'auto' takes a GPU if there is one", choices=("auto", "cpu", "cuda")
    )
    fp16: bool = flag(
        False,
        "compute in fp16, with fp32 master weights and gradient accumulation, and the loss scaled so that small "
        "gradients are not lost",
    )
    bf16: bool = flag(False, "compute in bfloat16, with fp32 master weights and gradient accumulation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp16 and self.bf16:
            raise InputError("--fp16 and --bf16 exclude each other; leave one of them out")
        if self.train_iters is None and self.train_samples is None:
            raise InputError("--train-iters or --train-samples is required: how long to train")
        if self.train_iters is not None and self.train_samples is not None:
            raise InputError("give --train-iters or --train-samples, and not both")
        if self.rampup_batch_size is not None and self.train_samples is None:
            raise InputError("--rampup-batch-size needs --train-samples in place of --train-iters")
        if not self.manual_gc and (self.manual_gc_interval or not self.manual_gc_eval):
            given = "--manual-gc-interval" if self.manual_gc_interval else "--no-manual-gc-eval"
            raise InputError(f"{given} needs --manual-gc")

    @property
    def precision(self) -> str:
        """What is computed in: "fp32", "fp16" or "bf16"."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig(Config):
    """What is reported, and where to."""

    log_interval: int = flag(100, "iterations between lines of the log", low=1)
    log_params_norm: bool = flag(False, "log the L2 norm of the parameters")
    metrics_path: str | None = flag(
        None,
        "write one JSON object per logged iteration and evaluation, at full precision; a run that resumes "
        "continues the file",
        metavar="FILE",
    )
    tensorboard_dir: str | None = flag(None, "write TensorBoard events to this folder", metavar="DIR")
    tensorboard_log_interval: int = flag(1, "iterations between points in TensorBoard", low=1)
    tensorboard_queue_size: int = flag(1000, "events held back before they are written", low=1)
    timing_log_level: int = flag(
        0,
        "times that are told with each line of the log: 0 none but that of an iteration, 1 those of its phases, 2 also "
        "what is done for every microbatch",
        low=0,
        high=2,
    )
    timing_log_option: str = flag(
        "minmax",
        "of the processes' times, tell the longest, the shortest and longest, or all",
        choices=("max", "minmax", "all"),
    )
    log_timers_to_tensorboard: bool = flag(
        False, "the longest times of --timing-log-level in TensorBoard and the file of metrics"
    )
    profile: bool = flag(
        False,
        "trace some iterations with torch.profiler, and write the traces and a page on where the time goes to the "
        "folder profile/ of --tensorboard-dir, or else of --save",
    )
    profile_step_start: int = flag(10, "profile the iterations after this one", low=0)
    profile_step_end: int = flag(12, "the last iteration that is profiled", low=1)
    profile_ranks: tuple[int, ...] = flag(
        (0,), "processes that are profiled, by rank (default: 0)", low=0, nargs="+", metavar="N"
    )
    log_memory_to_tensorboard: bool = flag(
        False,
        "bytes allocated and reserved, of the process with the most, in TensorBoard and the file of metrics",
    )
    wandb_project: str | None = flag(None, "report to this Weights & Biases project", metavar="NAME")
    wandb_exp_name: str | None = flag(None, "name of the run at Weights & Biases", metavar="NAME")
    progress: bool = flag(True, "no progress bar on a terminal")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profile and self.profile_step_end <= self.profile_step_start:
            raise InputError(
                f"--profile-step-end: {self.profile_step_end} must be greater than --profile-step-start "
                f"{self.profile_step_start}"
            )
        if self.wandb_exp_name is not None and self.wandb_project is None:
            raise InputError("--wandb-exp-name needs --wandb-project")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryRunConfig(Config):
    """What a run would need, counted without the devices, data or processes that it takes."""

    dry_run: bool = flag(
        False,
        "count memory, communication and operations of an iteration on some ranks, by tensors without values, and "
        "leave; takes one process and neither data nor GPU, and --device auto means a GPU",
    )
    world_size: int | None = flag(
        None, "processes that the run would have (default: as many as one replica takes)", low=1, high=10**6
    )
    dry_run_ranks: tuple[int, ...] | None = flag(
        None,
        "ranks to count for (default: the first of the first, the middle and the last stage)",
        low=0,
        nargs="+",
        metavar="N",
    )
    dry_run_json: str | None = flag(None, "write what was counted to this file too", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self)[1:]:
            if not self.dry_run and getattr(self, field.name) is not None:
                raise InputError(f"{flag_name(field)} needs --dry-run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a training run is configured by. Made by `megatron.arguments`, which has checked it."""

    training: TrainingConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    model: ModelConfig
    ops: OpsConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    evaluation: EvalTasksConfig
    dry_run: DryRunConfig
