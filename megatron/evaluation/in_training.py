"""Evaluation before the first iteration, and zero-shot tasks during training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from megatron.errors import InputError
from megatron.evaluation import zero_shot
from megatron.evaluation.config import EvalTasksConfig
from megatron.evaluation.tasks import ZeroShotTask, make_task, read_file
from megatron.evaluation.zero_shot import ZeroShotBatch
from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import raise_on_all_ranks
from megatron.parallel.padding import length_multiple
from megatron.parallel.random import DropoutKey
from megatron.tokenizer import Tokenizer
from megatron.training.config import RunConfig
from megatron.training.loop import Hook, Trainer
from megatron.training.report import EvalResult
from megatron.training.task import EvalMetric, Task


class EvalOnStart(Hook):
    """Let the evaluation that follows evaluate before the first iteration (--eval-on-start)."""

    def before_training(self, trainer: Trainer) -> None:
        if trainer.config.plugin(EvalTasksConfig).eval_on_start and trainer.state.iteration == 0:
            trainer.state.evaluation_due = True


class EvalTasks(Hook):
    """Run the tasks of --eval-tasks with every evaluation."""

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        with raise_on_all_ranks(trainer.mesh.world, InputError):
            self.tasks = read_eval_tasks(trainer.config, trainer.task, trainer.tokenizer, trainer.log)
        yield

    def evaluate(self, trainer: Trainer, where: str) -> None:
        for task in self.tasks:
            batches = zero_shot.make_batches(
                task,
                micro_batch_size=trainer.config.training.micro_batch_size,
                dp=trainer.mesh.dp,
                multiple=length_multiple(trainer.config.parallel),
            )
            with trainer.engine.phases("evaluate"):
                (total,), (count,) = trainer.engine.measure(batches, metric_of(task))
            assert count == task.count
            results = task.results(total)
            trainer.report_evaluation(
                EvalResult(
                    title=task.name,
                    where=where,
                    values={f"{task.name} {name}": value for name, value in results.items()},
                    line=task.line(results, f" at {where}"),
                )
            )


def read_eval_tasks(
    config: RunConfig, task: Task, tokenizer: Tokenizer, log: Callable[[str], None]
) -> list[ZeroShotTask]:
    """Read the tasks of --eval-tasks and `log` their notes.

    Raises:
        InputError: the model is no GPT, or a file does not fit its task.
    """
    settings = config.plugin(EvalTasksConfig)
    names, paths = settings.eval_tasks or (), settings.eval_tasks_data or ()
    if names and task.name != "GPT":
        raise InputError(f"--eval-tasks: {' '.join(names)} need a GPT, and this run trains {task.name}")
    tasks: list[ZeroShotTask] = []
    for name, path in zip(names, paths, strict=True):
        files = [read_file(path, "--eval-tasks-data")]
        tasks.append(make_task(name, files, tokenizer, settings, length=config.data.seq_length))
        for note in tasks[-1].notes:
            log(note)
    return tasks


def metric_of(task: ZeroShotTask) -> EvalMetric[ZeroShotBatch]:
    """Return the metric of a zero-shot task, for batches of `zero_shot.make_batches`."""

    def count(batch: ZeroShotBatch) -> Tensor:
        return zero_shot.count(batch, task).unsqueeze(0)

    def forward(
        model: GPTModel, batch: ZeroShotBatch, hidden: Tensor | None, dropout_key: DropoutKey | None
    ) -> Tensor:
        run = functools.partial(model, hidden_sbh=hidden, dropout_key=dropout_key)
        out = zero_shot.forward(run, batch, task)
        if model.output_layer is None:
            return out
        context = model.context
        total = zero_shot.total(out, batch, task, vocab_size=context.vocab_size, tp=context.tp, cp=context.cp)
        return total.unsqueeze(0)

    return EvalMetric(names=(task.name,), denominators=count, forward=forward)
