"""The parts that plug into the core: formats, flags and sample orders of other programs, hooks of a run, dry runs.

Only entry points import this module. Importing it fills the core's registries.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Sequence

import megatron.variants.registry  # noqa: F401 (fills the registry of the model's variants)
from megatron.arguments import AFTER_COMMAND_LINE, BEFORE_COMMAND_LINE, PARSER_EXTENSIONS
from megatron.checkpoint.formats import FORMATS
from megatron.cli import OTHER_NAMES
from megatron.data.split import DATA_ORDERS
from megatron.evaluation.config import EvalTasksConfig
from megatron.evaluation.in_training import EvalOnStart, EvalTasks
from megatron.faults.config import FaultsConfig
from megatron.faults.memory import check_model_memory
from megatron.faults.non_finite import NonFiniteGuard
from megatron.faults.replicas import ReplicaCheck
from megatron.faults.same_data import check_same_data
from megatron.faults.same_start import check_same_everywhere
from megatron.faults.watchdog import HangDetection
from megatron.interop.formats import EXTERNAL_FORMATS
from megatron.interop.nvidia.data_order import HeadDataOrder
from megatron.interop.nvidia.flags import add_nvidia_flags
from megatron.interop.nvidia.loss_mean import LossMeanConfig, with_microbatch_means
from megatron.interop.other_names import FLAG_NAMES
from megatron.performance.async_save import AsyncSaving
from megatron.performance.config import PerformanceConfig
from megatron.performance.cuda_graph import CudaGraph
from megatron.performance.manual_gc import ManualGC
from megatron.planner.config import DryRunConfig
from megatron.planner.device_specs import peak_flops
from megatron.recipes.config import LossScaleConfig, RampUpConfig, SpikeConfig
from megatron.recipes.loss_scale import make_loss_scaler
from megatron.recipes.rampup import with_rampup
from megatron.recipes.spikes import make_spike_rule
from megatron.reports.at_end import ReportAtEnd
from megatron.reports.config import ProfileConfig, ReportConfig, TimingConfig
from megatron.reports.devices import PEAK_FLOPS
from megatron.reports.layout import LayoutTable
from megatron.reports.profile import Profiling
from megatron.reports.reports import ProgressBar, Reports
from megatron.reports.throughput import Throughput
from megatron.reports.timers import PhaseTimes
from megatron.settings.checkpoint_args import add_checkpoint_args
from megatron.settings.config import SettingsConfig
from megatron.settings.config_file import add_config_flag, parse_config_file
from megatron.settings.shorthands import ShorthandConfig, expand_shorthands
from megatron.training.batch_size import BATCH_SCHEDULES
from megatron.training.build import MODEL_CHECKS
from megatron.training.config import PLUGIN_CONFIGS, RunConfig
from megatron.training.engine import STEP_RULES
from megatron.training.hooks import Evaluation, Saving
from megatron.training.log_hook import Logging
from megatron.training.loop import Hook
from megatron.training.pretrain import START_CHECKS, pretrain
from megatron.training.task import Task

OTHER_NAMES.update(FLAG_NAMES)
DATA_ORDERS.update({"head": HeadDataOrder()})
FORMATS.update(EXTERNAL_FORMATS)
PLUGIN_CONFIGS.update(
    {
        "settings": SettingsConfig,
        "shorthands": ShorthandConfig,
        "loss scale": LossScaleConfig,
        "spikes": SpikeConfig,
        "ramp-up": RampUpConfig,
        "performance": PerformanceConfig,
        "reports": ReportConfig,
        "timing": TimingConfig,
        "profile": ProfileConfig,
        "faults": FaultsConfig,
        "evaluation": EvalTasksConfig,
        "dry run": DryRunConfig,
        "loss": LossMeanConfig,
    }
)
PARSER_EXTENSIONS[:] = [add_config_flag, add_nvidia_flags]
BEFORE_COMMAND_LINE[:] = [parse_config_file]
AFTER_COMMAND_LINE[:] = [expand_shorthands, add_checkpoint_args]
PEAK_FLOPS[:] = [peak_flops]
MODEL_CHECKS[:] = [check_model_memory]
START_CHECKS[:] = [check_same_everywhere, check_same_data]
STEP_RULES[:] = [make_loss_scaler, make_spike_rule]
BATCH_SCHEDULES[:] = [with_rampup]


def run(config: RunConfig, task: Task, hooks: Sequence[Hook] = ()) -> int:
    """Pretrain `task`, or count what that would take (--dry-run). Returns the exit status.

    Args:
        hooks: called after those of every run.
    """
    # Prints all stacks if a signal ends the process, such as SIGBUS (a truncated data file).
    faulthandler.enable(sys.__stderr__ or 2)
    task = with_loss_mean(config, task)
    if config.plugin(DryRunConfig).dry_run:
        from megatron.planner.dry_run import dry_run  # takes seconds to import

        return dry_run(config, task)
    return pretrain(config, task, [*training_hooks(), *hooks])


def with_loss_mean(config: RunConfig, task: Task) -> Task:
    """Apply --loss-mean to a task."""
    by_microbatch = config.plugin(LossMeanConfig).loss_mean == "microbatches"
    return with_microbatch_means(task) if by_microbatch else task


def training_hooks(evaluation: Sequence[Hook] = ()) -> list[Hook]:
    """Hooks of a run in the order in which they are called.

    Args:
        evaluation: hooks that evaluate and save in place of the usual ones.
    """
    return [
        LayoutTable(),
        PhaseTimes(),
        ReportAtEnd(),  # after the writers of Reports are closed
        Reports(),
        ProgressBar(),
        HangDetection(),
        CudaGraph(),
        ManualGC(),
        Profiling(),
        NonFiniteGuard(),
        Logging(),
        Throughput(),
        ReplicaCheck(),
        AsyncSaving(),
        EvalOnStart(),
        *(evaluation or (Evaluation(), EvalTasks(), Saving())),
    ]
