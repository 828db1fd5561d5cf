"""Flags of zero-shot evaluation, by itself and within a training run."""

from __future__ import annotations

import dataclasses

from megatron.flags import Config, InputError, flag

TASKS = ("WIKITEXT103", "LAMBADA", "PPL")


# What Megatron-LM measures WIKITEXT103 with unless told otherwise.
NVIDIA_OVERLAP = 32
STRICT = "LAMBADA: the whole last word is to be predicted, in place of its last token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShotConfig(Config):
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
    overlapping_eval: int | None = flag(
        None,
        "tokens that each window over the text scores after the first, the rest being their context (default: for "
        "WIKITEXT103 32, as in Megatron-LM; for PPL --seq-length, so that windows do not overlap)",
        low=1,
    )
    strict_lambada: bool = flag(False, STRICT)
    seq_length: int | None = flag(None, "tokens that the model sees (default: its context)", low=1)
    micro_batch_size: int = flag(8, "samples that a replica of the model works on at once", low=1)

    def stride(self, length: int) -> int:
        """Tokens that windows of `length` score after the first."""
        if self.overlapping_eval is None:
            return min(NVIDIA_OVERLAP, length) if self.task == "WIKITEXT103" else length
        return self.overlapping_eval


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTasksConfig(Config):
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
    overlapping_eval: int | None = flag(
        None,
        "WIKITEXT103, PPL: tokens that each window over the text scores after the first, the rest being their context "
        "(default: --seq-length, so that windows do not overlap)",
        low=1,
    )
    strict_lambada: bool = flag(False, STRICT)

    def stride(self, length: int) -> int:
        """Tokens that windows of `length` score after the first."""
        return self.overlapping_eval or length

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks, files = self.eval_tasks or (), self.eval_tasks_data or ()
        if len(tasks) != len(files):
            raise InputError(
                f"--eval-tasks-data: {len(files)} files for the {len(tasks)} of --eval-tasks; give one for each"
            )
        if len(set(tasks)) < len(tasks):
            raise InputError(f"--eval-tasks: {' '.join(tasks)} names a task twice")
