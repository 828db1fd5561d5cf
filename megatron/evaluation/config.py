"""Flags of zero-shot evaluation, by itself and within a training run."""

from __future__ import annotations

import dataclasses

from megatron.flags import Config, InputError, flag

TASKS = ("WIKITEXT103", "LAMBADA", "PPL")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringConfig(Config):
    """How the texts of the tasks are scored."""

    overlapping_eval: int | None = flag(
        None,
        "WIKITEXT103, PPL: tokens that each window over the text scores after the first, the rest being their context "
        "(default: --seq-length, windows that do not overlap)",
        low=1,
    )
    strict_lambada: bool = flag(
        False, "LAMBADA: the whole last word is to be predicted, in place of its last token"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShotConfig(ScoringConfig):
    """What a trained model is evaluated on."""

    task: str = flag(
        None,
        "WIKITEXT103: perplexity of tokenised WikiText, per word of it; LAMBADA: how many last words are predicted; "
        "PPL: perplexity of any text",
        choices=TASKS,
        required=True,
    )
    valid_data: tuple[str, ...] = flag(
        None,
        "text files as they are, or for LAMBADA files of a JSON object with a 'text' on each line",
        nargs="+",
        metavar="FILE",
        required=True,
    )
    seq_length: int | None = flag(None, "tokens that the model sees (default: its context)", low=1)
    micro_batch_size: int = flag(8, "samples that a replica of the model works on at once", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTasksConfig(ScoringConfig):
    """Zero-shot tasks at every evaluation of a run that trains GPT."""

    eval_tasks: tuple[str, ...] | None = flag(
        None,
        "zero-shot tasks that are run wherever the run evaluates",
        choices=TASKS,
        nargs="+",
        metavar="TASK",
    )
    eval_tasks_data: tuple[str, ...] | None = flag(
        None, "a file for each of --eval-tasks, in the same order", nargs="+", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks, files = self.eval_tasks or (), self.eval_tasks_data or ()
        if len(tasks) != len(files):
            raise InputError(
                f"--eval-tasks-data: {len(files)} files for the {len(tasks)} of --eval-tasks; give one for each"
            )
        if len(set(tasks)) < len(tasks):
            raise InputError(f"--eval-tasks: {' '.join(tasks)} names a task twice")
