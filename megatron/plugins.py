"""The parts that plug into the core: formats, flags and sample orders of other programs, hooks of a run, dry runs.

Only entry points import this module. Importing it fills the core's registries.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import sys
from collections.abc import Sequence

import torch

import megatron.plugin_flags  # noqa: F401 (registers the flags of plug-ins)
from megatron.checkpoint.formats import FORMATS
from megatron.context_parallel.setup import check_context_parallel, context_parallel_ops
from megatron.data.bert_dataset import BertDatasetBuilder
from megatron.data.build import MOCK_DATA, SOURCES
from megatron.data.gpt_dataset import PACKINGS, GPTDatasetBuilder
from megatron.evaluation.in_training import EvalOnStart, EvalTasks
from megatron.faults.file_limit import raise_file_limit
from megatron.faults.gloo_on_gpu import check_gloo_on_gpu
from megatron.faults.memory import check_model_memory, memory_errors_explained
from megatron.faults.non_finite import NonFiniteGuard
from megatron.faults.replicas import ReplicaCheck
from megatron.faults.resume_notes import resume_notes
from megatron.faults.same_data import check_same_data
from megatron.faults.same_start import check_same_everywhere
from megatron.faults.watchdog import HangDetection
from megatron.inference.in_training import SampleTexts
from megatron.interop.formats import EXTERNAL_FORMATS
from megatron.interop.nvidia.data_order import HeadBlendRounding
from megatron.interop.nvidia.loss_mean import LossMeanConfig, with_microbatch_means
from megatron.ops.backend import LAYER_OPS
from megatron.optim.schedule import LR_DECAYS
from megatron.parallel.stages import LAYER_SPLITS
from megatron.performance.activation_offload import offload_activations
from megatron.performance.async_save import AsyncSaving
from megatron.performance.compiled_layer import layer_ops
from megatron.performance.config import PerformanceConfig
from megatron.performance.cuda_graph import CudaGraph, check_cuda_graph, check_graphed_passes
from megatron.performance.fp8 import use_fp8
from megatron.performance.load import LoadWarning
from megatron.performance.manual_gc import ManualGC
from megatron.performance.post_validation import post_validate
from megatron.performance.tp_overlap import TPCommOverlap
from megatron.planner.config import DryRunConfig
from megatron.planner.device_specs import peak_flops
from megatron.recipes.exit import Exit
from megatron.recipes.expert_balance import ExpertBias, LastLoad
from megatron.recipes.extension import Extension
from megatron.recipes.freeze import FreezeCheck, Frozen, FrozenBias
from megatron.recipes.length import check_length, with_epochs
from megatron.recipes.loss_scale import make_loss_scaler
from megatron.recipes.rampup import with_rampup
from megatron.recipes.retention import Retention
from megatron.recipes.roll_back import RollBack
from megatron.recipes.save_best import SaveBest
from megatron.recipes.spikes import make_spike_rule
from megatron.reports.at_end import ReportAtEnd
from megatron.reports.data_phases import DataPhases
from megatron.reports.devices import PEAK_FLOPS
from megatron.reports.experts import ExpertReport
from megatron.reports.log import LogLines
from megatron.reports.params_norm import ParamsNorm
from megatron.reports.profile import Profiling
from megatron.reports.reports import ProgressBar, Reports
from megatron.reports.run_size import RunSize
from megatron.reports.throughput import Throughput
from megatron.reports.timers import PhaseTimes
from megatron.settings.rolled_back import without_repetition
from megatron.training.batch_size import BATCH_SCHEDULES
from megatron.training.build import ENGINE_HOOKS, FIRST_OPTIMIZERS, MODEL_HOOKS, OPS_HOOKS
from megatron.training.config import RunConfig
from megatron.training.engine import STEP_RULES, TUNED_SCHEDULES
from megatron.training.hooks import Evaluation, Saving
from megatron.training.layout import BATCH_CHECKS
from megatron.training.log_hook import Logging
from megatron.training.loop import Hook
from megatron.training.pretrain import START_CHECKS, pretrain
from megatron.training.start import RESUME_NOTES
from megatron.training.task import Task
from megatron.variants import lr_decay
from megatron.variants.auto_schedule import tuned
from megatron.variants.auto_stages import with_auto_layout
from megatron.variants.best_fit import BestFitDataset, load_or_build
from megatron.variants.blend import ROUNDINGS, open_blend
from megatron.variants.data_phases import open_phases
from megatron.variants.layer_pattern import check_layers
from megatron.variants.mock_data import mock_bert, mock_gpt
from megatron.variants.multi_token_prediction import with_mtp
from megatron.variants.padding_free import check_padding_free
from megatron.variants.registry import check_variants  # and fills the registry of the model's variants
from megatron.variants.schedules import check_full_groups, check_schedule
from megatron.variants.stages import check_depths, counted_split, layout_split, uneven_split, virtual_split
from megatron.verify.capture import Capturing

ROUNDINGS.update({"head": HeadBlendRounding()})
SOURCES[:] = [open_phases, open_blend]
MOCK_DATA.update({GPTDatasetBuilder: mock_gpt, BertDatasetBuilder: mock_bert})
PACKINGS.update({"best-fit": (BestFitDataset, load_or_build)})
FORMATS.update(EXTERNAL_FORMATS)
LAYER_OPS[:] = [layer_ops]
PEAK_FLOPS[:] = [peak_flops]
TUNED_SCHEDULES.update({"auto": tuned})
LR_DECAYS.update(lr_decay.LR_DECAYS)
LAYER_SPLITS.update(
    {"counted": counted_split, "layout": layout_split, "uneven": uneven_split, "virtual": virtual_split}
)
BATCH_CHECKS[:] = [check_length, check_full_groups, check_schedule, check_depths, check_graphed_passes]
OPS_HOOKS[:] = [context_parallel_ops]
MODEL_HOOKS[:] = [check_model_memory, use_fp8, offload_activations]
ENGINE_HOOKS[:] = [post_validate]
FIRST_OPTIMIZERS[:] = [FrozenBias, ExpertBias, LastLoad, Frozen]
RESUME_NOTES[:] = [resume_notes]
START_CHECKS[:] = [check_gloo_on_gpu, check_same_everywhere, check_same_data]
STEP_RULES[:] = [make_loss_scaler, make_spike_rule]
BATCH_SCHEDULES[:] = [with_rampup]


def run(config: RunConfig, task: Task, hooks: Sequence[Hook] = ()) -> int:
    """Pretrain `task`, or count what that would take (--dry-run). Returns the exit status.

    Args:
        hooks: called after those of every run.
    """
    # Prints all stacks if a signal ends the process, such as SIGBUS (a truncated data file).
    faulthandler.enable(sys.__stderr__ or 2)
    config, task = prepared(config, task)
    if config.plugin(DryRunConfig).dry_run:
        from megatron.planner.dry_run import dry_run  # takes seconds to import

        return dry_run(config, task)
    return train(config, task, [*training_hooks(), *hooks])


def prepared(config: RunConfig, task: Task) -> tuple[RunConfig, Task]:
    """Check a run, and apply --mtp-num-layers and --loss-mean to its task and --train-epochs to its length."""
    config = checked(config, task)
    task = with_mtp(config, task)
    if config.plugin(LossMeanConfig).loss_mean == "microbatches":
        task = with_microbatch_means(task)
    return with_epochs(config, task), task


def checked(config: RunConfig, task: Task) -> RunConfig:
    """Check that what plugs in can run `task`, and replace the automatic --pipeline-model-parallel-layout.

    Raises:
        InputError: it cannot.
    """
    check_variants(config.model)
    check_layers(config.model, task.name)
    check_context_parallel(config, task)
    check_padding_free(config)
    return with_auto_layout(config)


def train(config: RunConfig, task: Task, hooks: Sequence[Hook]) -> int:
    """Train `task` with `hooks`, --num-threads and as many open files as allowed; explain errors of too little memory.

    Returns the exit status.
    """
    check_cuda_graph(config, task)
    if (threads := config.plugin(PerformanceConfig).num_threads) is not None:
        torch.set_num_threads(threads)
    raise_file_limit()
    config = dataclasses.replace(config, checkpoint=without_repetition(config.checkpoint))
    with memory_errors_explained(config):
        return pretrain(config, task, hooks)


def training_hooks(evaluation: Sequence[Hook] = ()) -> list[Hook]:
    """Hooks of a run in the order in which they are called.

    Args:
        evaluation: hooks that evaluate and save in place of the usual ones.
    """
    reports = Reports()
    return [
        Capturing(),  # before those that collect the values of a step
        Exit(),  # before those that ask whether the run goes on
        FreezeCheck(),
        RollBack(),
        Extension(),
        LoadWarning(),
        LogLines(),  # before those that log more on an interval
        RunSize(),
        DataPhases(),
        PhaseTimes(reports),
        ReportAtEnd(),  # after the writers of Reports are closed
        reports,
        ProgressBar(),
        HangDetection(),
        TPCommOverlap(),
        CudaGraph(),
        ManualGC(),
        Profiling(),
        NonFiniteGuard(),
        Logging(),
        ParamsNorm(),
        ExpertReport(),
        Throughput(reports),
        ReplicaCheck(),
        AsyncSaving(),
        Retention(),
        SampleTexts(reports),
        EvalOnStart(),
        *(evaluation or (Evaluation(), EvalTasks(), Saving(), SaveBest())),
    ]
