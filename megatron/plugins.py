"""The parts that plug into the core: formats, flags and sample orders of other programs, hooks of a run, dry runs.

Only entry points import this module. Importing it fills the core's registries.
"""

from __future__ import annotations

from collections.abc import Sequence

import megatron.interop.formats  # noqa: F401 (registers checkpoint formats)
from megatron.arguments import PARSER_EXTENSIONS
from megatron.cli import OTHER_NAMES
from megatron.data.split import DATA_ORDERS
from megatron.evaluation.config import EvalTasksConfig
from megatron.evaluation.in_training import EvalTasks
from megatron.faults.config import FaultsConfig
from megatron.faults.non_finite import NonFiniteGuard
from megatron.faults.replicas import ReplicaCheck
from megatron.faults.watchdog import HangDetection
from megatron.interop.nvidia.data_order import HeadDataOrder
from megatron.interop.nvidia.flags import add_nvidia_flags
from megatron.interop.other_names import FLAG_NAMES
from megatron.planner.config import DryRunConfig
from megatron.reports.config import ProfileConfig, ReportConfig
from megatron.reports.profile import Profiling
from megatron.reports.writers import MetricsFile, TensorBoard, WeightsAndBiases
from megatron.training.config import PLUGIN_CONFIGS, RunConfig
from megatron.training.hooks import Evaluation, ManualGC, Saving
from megatron.training.log_hook import Logging
from megatron.training.loop import Hook
from megatron.training.pretrain import pretrain
from megatron.training.report import WRITERS
from megatron.training.task import Task

PARSER_EXTENSIONS[:] = [add_nvidia_flags]
OTHER_NAMES.update(FLAG_NAMES)
DATA_ORDERS["head"] = HeadDataOrder()
WRITERS[:] = [MetricsFile, TensorBoard, WeightsAndBiases]
PLUGIN_CONFIGS.update(
    {
        "reports": ReportConfig,
        "profile": ProfileConfig,
        "faults": FaultsConfig,
        "evaluation": EvalTasksConfig,
        "dry run": DryRunConfig,
    }
)


def run(config: RunConfig, task: Task) -> int:
    """Pretrain `task`, or count what that would take (--dry-run). Returns the exit status."""
    if config.plugin(DryRunConfig).dry_run:
        from megatron.planner.dry_run import dry_run  # takes seconds to import

        return dry_run(config, task)
    return pretrain(config, task, training_hooks())


def training_hooks(evaluation: Sequence[Hook] = ()) -> list[Hook]:
    """Hooks of a run in the order in which they are called.

    Args:
        evaluation: hooks that evaluate and save in place of the usual ones.
    """
    return [
        HangDetection(),
        ManualGC(),
        Profiling(),
        NonFiniteGuard(),
        Logging(),
        ReplicaCheck(),
        *(evaluation or (Evaluation(), EvalTasks(), Saving())),
    ]
