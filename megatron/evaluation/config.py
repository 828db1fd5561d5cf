"""Flags of zero-shot evaluation, of a checkpoint and within a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.inference.config import InferenceConfig
from megatron.parallel.config import CP_COMM_TYPES, ParallelConfig
from megatron.training.config import PluginConfig, RunConfig

TASKS = ("WIKITEXT103", "LAMBADA", "PPL")


# Megatron-LM's default of --overlapping-eval.
NVIDIA_OVERLAP = 32
STRICT_HELP = "LAMBADA: predict the whole last word instead of its last token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShotConfig(Config):
    """The task, its data, and how to batch it."""

    task: str = flag(
        None,
        "WIKITEXT103: perplexity of tokenized WikiText per original word; LAMBADA: accuracy of the last word; "
        "PPL: perplexity of any text",
        choices=TASKS,
        required=True,
    )
    valid_data: tuple[str, ...] = flag(
        None,
        "plain text files; for LAMBADA, files with a JSON object with a 'text' per line",
        nargs="+",
        metavar="FILE",
        required=True,
    )
    overlapping_eval: int | None = flag(
        None,
        "stride of the windows over the text: tokens that each window after the first scores, with the rest as context "
        "(default: 32 for WIKITEXT103, as in Megatron-LM; --seq-length, no overlap, for PPL)",
        low=1,
    )
    strict_lambada: bool = flag(False, STRICT_HELP)
    seq_length: int | None = flag(None, "tokens per sequence (default: the model's context length)", low=1)
    micro_batch_size: int = flag(8, "samples per batch of each replica", low=1)
    by_context: bool = flag(
        False, "WIKITEXT103, PPL: also the loss of tokens with little and with much context in their window"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by_context and self.task == "LAMBADA":
            raise InputError("--by-context: LAMBADA has no loss to report; give another --task")
        check_effect(self, "--task", (self.task,))

    def stride(self, length: int) -> int:
        """Return the number of tokens that each window of `length` but the first scores."""
        if self.overlapping_eval is None:
            return min(NVIDIA_OVERLAP, length) if self.task == "WIKITEXT103" else length
        return self.overlapping_eval


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShotModelConfig(InferenceConfig):
    """A checkpoint saved in any layout, and the layout to evaluate it in."""

    context_parallel_size: int = flag(1, "ranks that divide each sequence", low=1)
    cp_comm_type: str = flag(
        "p2p",
        "communication of attention with context parallelism, as in training",
        choices=CP_COMM_TYPES,
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(
        None, "with --cp-comm-type a2a+p2p: ranks of a group, and number of groups", low=1, nargs="+"
    )

    @property
    def parallel(self) -> ParallelConfig:
        return dataclasses.replace(
            super().parallel,
            context_parallel_size=self.context_parallel_size,
            cp_comm_type=self.cp_comm_type,
            hierarchical_context_parallel_sizes=self.hierarchical_context_parallel_sizes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTasksConfig(PluginConfig):
    """Evaluation before the first iteration, and zero-shot tasks during the training of a GPT."""

    eval_on_start: bool = flag(False, "evaluate before the first iteration too")
    eval_tasks: tuple[str, ...] | None = flag(
        None,
        "zero-shot tasks to run with every evaluation",
        choices=TASKS,
        nargs="+",
        metavar="TASK",
    )
    eval_tasks_data: tuple[str, ...] | None = flag(
        None, "a file for each of --eval-tasks, in the same order", nargs="+", metavar="FILE"
    )
    overlapping_eval: int | None = flag(
        None,
        "WIKITEXT103, PPL: stride of windows over the text: tokens that each window after the first scores, with the "
        "rest as context (default: --seq-length, no overlap)",
        low=1,
    )
    strict_lambada: bool = flag(False, STRICT_HELP)

    def stride(self, length: int) -> int:
        """Return the number of tokens that each window of `length` but the first scores."""
        return self.overlapping_eval or length

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks, files = self.eval_tasks or (), self.eval_tasks_data or ()
        if len(tasks) != len(files):
            raise InputError(
                f"--eval-tasks-data: {len(files)} files for {len(tasks)} --eval-tasks; give one for each task"
            )
        if len(set(tasks)) < len(tasks):
            raise InputError(f"--eval-tasks: {' '.join(tasks)} names a task twice")
        check_effect(self, "--eval-tasks", tasks)

    def check(self, run: RunConfig) -> None:
        if self.eval_tasks and run.parallel.v_shaped:
            raise InputError(
                f"--eval-tasks does not go with --pipeline-schedule {run.parallel.pipeline_schedule}; leave it out"
            )


def check_effect(config: ZeroShotConfig | EvalTasksConfig, flag: str, tasks: Collection[str]) -> None:
    """Raise `InputError` for a flag that none of the tasks uses, which `flag` names."""
    if config.strict_lambada and "LAMBADA" not in tasks:
        raise InputError(f"--strict-lambada: needs {flag} LAMBADA; leave it out")
    if config.overlapping_eval is not None and not {"WIKITEXT103", "PPL"} & set(tasks):
        raise InputError(f"--overlapping-eval: needs {flag} WIKITEXT103 or PPL; leave it out")
