"""Zero-shot tasks on the model that is being trained (--eval-tasks)."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from megatron.data.loader import Batch
from megatron.evaluation import zero_shot
from megatron.evaluation.tasks import ZeroShotTask, make_task, read_file
from megatron.flags import InputError
from megatron.model.gpt import GPTModel
from megatron.parallel.random import DropoutKey
from megatron.tokenizer import Tokenizer
from megatron.training.config import RunConfig
from megatron.training.task import Measure, Task


def read_eval_tasks(
    config: RunConfig, task: Task, tokenizer: Tokenizer, say: Callable[[str], None]
) -> list[ZeroShotTask]:
    """The tasks of --eval-tasks; `say` tells people what they should know of them.

    Raises:
        InputError: the run trains no GPT, or a file does not hold what its task needs.
    """
    names, paths = config.evaluation.eval_tasks or (), config.evaluation.eval_tasks_data or ()
    if names and task.name != "GPT":
        raise InputError(f"--eval-tasks: {' '.join(names)} are for a GPT, and this run trains {task.name}")
    length, found = config.data.seq_length, []
    for name, path in zip(names, paths, strict=True):
        files = [read_file(path, "--eval-tasks-data")]
        found.append(make_task(name, files, tokenizer, config.evaluation, length=length))
        for note in found[-1].notes:
            say(note)
    return found


def measure_of(task: ZeroShotTask) -> Measure:
    """The sum of a task and what it is over, of the batches that `zero_shot.make_batches` gives."""

    def count(batch: Batch) -> Tensor:
        return batch["tokens"].new_full((1,), zero_shot.count(batch, task))

    def forward(model: GPTModel, batch: Batch, hidden: Tensor | None, dropout_key: DropoutKey) -> Tensor:
        called = functools.partial(model, hidden_sbh=hidden, dropout_key=dropout_key)
        out = zero_shot.forward(called, batch, task)
        if model.output_layer is None:
            return out
        total = zero_shot.total(out, batch, task, vocab_size=model.vocab_size, tp=model.tp.axis)
        return total.unsqueeze(0)

    return Measure(names=(task.name,), count=count, forward=forward)
