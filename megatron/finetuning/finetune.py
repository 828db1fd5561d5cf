"""Fine-tune BERT on labeled texts: epochs, the accuracy on each file, and the best checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.storage import folder_of, newest_iteration, replace_text
from megatron.data.dataset import Dataset
from megatron.data.loader import eval_batches
from megatron.errors import InputError, TrainingFault
from megatron.finetuning.classification import (
    FORMATS,
    ClassificationBatch,
    ClassificationDataset,
    Epochs,
    Example,
    Format,
)
from megatron.finetuning.pretrained import load_pretrained
from megatron.flags import Config, flag
from megatron.model.bert import BertClassifier
from megatron.model.context import ModelContext
from megatron.parallel.collectives import raise_on_all_ranks
from megatron.parallel.padding import length_multiple
from megatron.parallel.random import DropoutKey
from megatron.parallel.stages import Chunk
from megatron.recipes.best import keep_best
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.bert import BertWordPieceTokenizer
from megatron.training.config import RunConfig
from megatron.training.hooks import Saving
from megatron.training.loop import Trainer
from megatron.training.report import EvalResult
from megatron.training.task import EvalMetric, Task

ACCURACY = "accuracy.json"  # in the directory of a checkpoint: its accuracy on each file
TRAIN = "train"  # name of the training dataset; the others have the names of files


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Config):
    """Data and duration of fine-tuning."""

    task: str = flag(None, "dataset whose format the files have", choices=tuple(FORMATS), required=True)
    train_data: tuple[str, ...] = flag(
        None,
        "training files: TSV with the columns of GLUE (MNLI, QQP); for RACE, directories of .txt files, or files with "
        "a JSON object per line",
        nargs="+",
        metavar="PATH",
        required=True,
    )
    valid_data: tuple[str, ...] = flag(
        None,
        "files of the same format, on which the accuracy is evaluated after each epoch",
        nargs="+",
        metavar="PATH",
        required=True,
    )
    epochs: int = flag(
        3,
        "passes over the training data; 0 only evaluates the accuracy of --load",
        low=0,
    )
    skip_bad_rows: bool = flag(False, "skip unusable rows and log their number")


@dataclasses.dataclass(frozen=True)
class Examples:
    """Training examples of all files, and validation examples by file name."""

    train: list[Example]
    valid: dict[str, list[Example]]


def read_examples(config: FinetuneConfig, log: Callable[[str], None]) -> Examples:
    """Read all files, logging the number of examples.

    Raises:
        InputError: with the file and the row.
    """
    form = FORMATS[config.task]

    def read(path: str, flag: str) -> list[Example]:
        bad: list[str] = []
        found = form.read(Path(path), bad.append if config.skip_bad_rows else None)
        if not found:
            raise InputError(f"{flag}: {path} has no examples")
        log(f"{flag} {path}: {len(found):,} examples" + (f"; {len(bad):,} bad rows skipped" if bad else ""))
        for fault in bad[:3]:
            log(f"  {fault}")
        return found

    # File names, or whole paths if the names are ambiguous.
    names = [Path(path).name for path in config.valid_data]
    paths = [str(Path(path).resolve()) for path in config.valid_data]
    if len(set(names)) < len(names) or TRAIN in names:
        names = paths
    if len(set(paths)) < len(paths):
        raise InputError(f"--valid-data: {' '.join(config.valid_data)} has a duplicate file")
    train = [example for path in config.train_data for example in read(path, "--train-data")]
    valid = {name: read(path, "--valid-data") for name, path in zip(names, config.valid_data, strict=True)}
    return Examples(train, valid)


def has_run(folder: str | None) -> TypeGuard[str]:
    """Check if the directory of --save has a run to resume."""
    return folder is not None and Path(folder).is_dir() and newest_iteration(Path(folder)) is not None


def with_epochs(
    config: RunConfig, finetune: FinetuneConfig, examples: int, replicas: int, log: Callable[[str], None]
) -> RunConfig:
    """Return the configuration of a run of `finetune.epochs`, which saves and evaluates after each epoch.

    If --save has a run, the new one resumes it.

    Raises:
        InputError: an epoch is shorter than a batch, or the batch size is not that of the run to resume.
    """
    training, checkpoint = config.training, config.checkpoint
    if finetune.epochs == 0 and (checkpoint.save is not None or checkpoint.load is None):
        raise InputError("--epochs: 0 evaluates a checkpoint; give it to --load, and leave out --save")
    batch_size = training.global_batch_size
    resumed = None
    if has_run(checkpoint.save):
        resumed = find_checkpoint(checkpoint.save, checkpoint.save, verify=False)
    if resumed is not None:
        saved = resumed.state["config"]
        train_data = saved.get("fine-tuning", {}).get("train_data")
        if train_data != list(finetune.train_data):
            log(f"note: --train-data changed from {train_data} to {list(finetune.train_data)}")
        before = saved.get("training", {}).get("global_batch_size", batch_size)
        if batch_size not in (None, before):
            raise InputError(
                f"--global-batch-size: {batch_size}, but the run in {checkpoint.save} has {before}, which defines its "
                "epochs; leave the flag out, or choose another --save"
            )
        batch_size = before
    batch_size = batch_size or training.micro_batch_size * replicas
    steps = examples // batch_size
    if steps == 0:
        raise InputError(
            f"--train-data: has {examples} examples, fewer than a batch of {batch_size}; lower --global-batch-size "
            "(default: --micro-batch-size times data-parallel size)"
        )
    load, save = (
        None if path is None else Path(path).resolve() for path in (checkpoint.load, checkpoint.save)
    )
    checkpoint = dataclasses.replace(
        checkpoint,
        load=checkpoint.load if resumed is None else checkpoint.save,
        ckpt_step=checkpoint.ckpt_step if resumed is None or load == save else None,
        finetune=resumed is None and checkpoint.load is not None,
        save_interval=None if checkpoint.save is None else steps,
    )
    training = dataclasses.replace(
        training,
        global_batch_size=batch_size,
        train_iters=max(1, finetune.epochs) * steps,
        skip_train=finetune.epochs == 0,
        eval_interval=steps,
    )
    return dataclasses.replace(config, training=training, checkpoint=checkpoint)


def finetune_task(finetune: FinetuneConfig, examples: Examples) -> Task[ClassificationBatch]:
    """Return the task of predicting the label of each example."""
    form = FORMATS[finetune.task]
    return Task(
        name=f"BERT fine-tuned on {finetune.task}",
        loss_names=("loss",),
        build_model=functools.partial(build_model, form),
        build_datasets=functools.partial(build_datasets, finetune, examples),
        loss_denominators=loss_denominators,
        num_logits=lambda _: 0,
        forward=functools.partial(forward, form, with_accuracy=False),
        metric=EvalMetric(
            names=("loss", "accuracy"),
            denominators=lambda batch: loss_denominators(batch).expand(2),
            forward=functools.partial(forward, form, with_accuracy=True),
        ),
        init_from=dict.fromkeys(("BERT", "BERT --bert-no-binary-head"), load_pretrained),
        length_flags="--epochs",
        extra_config={"fine-tuning": dataclasses.asdict(finetune)},
    )


def build_model(
    form: Format, config: RunConfig, context: ModelContext, chunk: Chunk | None
) -> BertClassifier:
    return BertClassifier(config.model, context, chunk, scores=form.scores)


def build_datasets(
    finetune: FinetuneConfig,
    examples: Examples,
    config: RunConfig,
    tokenizer: Tokenizer,
    samples: tuple[int, int, int],
) -> dict[str, Dataset]:
    if not isinstance(tokenizer, BertWordPieceTokenizer):
        raise InputError(
            f"--tokenizer-type: {tokenizer.name} is not a BERT tokenizer; use BertWordPieceLowerCase or "
            "BertWordPieceCase, with the vocab.txt of the pretrained model"
        )
    dataset = functools.partial(
        ClassificationDataset,
        tokenizer=tokenizer,
        seq_length=config.data.seq_length,
        keeps_first=FORMATS[finetune.task].keeps_first,
        length_multiple=length_multiple(config.parallel),
    )
    steps, batch_size = config.training.eval_interval, config.training.global_batch_size
    assert steps is not None and batch_size is not None  # set by `with_epochs`
    train = Epochs(
        dataset(examples.train),
        epochs=max(1, finetune.epochs),
        samples_per_epoch=steps * batch_size,
        seed=config.training.seed,
    )
    return {TRAIN: train, **{name: dataset(found) for name, found in examples.valid.items()}}


def loss_denominators(batch: ClassificationBatch) -> Tensor:
    return batch.labels.new_full((1,), len(batch.labels))


def forward(
    form: Format,
    model: BertClassifier,
    batch: ClassificationBatch,
    hidden: Tensor | None,
    dropout_key: DropoutKey | None,
    *,
    with_accuracy: bool,
) -> Tensor:
    """Return the sum of the losses, [1], with the number of correct answers if `with_accuracy`, [2]."""
    out = model(
        batch.tokens,
        batch.padding_mask,
        batch.tokentype_ids,
        hidden_sbh=hidden,
        dropout_key=dropout_key,
    )
    if model.classification_head is None:
        return out
    logits, labels = out.float().view(-1, form.choices * form.scores), batch.labels
    sums = [F.cross_entropy(logits, labels, reduction="sum")]
    if with_accuracy:
        sums.append((logits.argmax(1) == labels).sum().float())
    return torch.stack(sums)


class EpochEvaluation(Saving):
    """Save after each epoch, evaluate on whole files, and keep the best checkpoint."""

    def __init__(self, finetune: FinetuneConfig) -> None:
        self.finetune = finetune

    def before_training(self, trainer: Trainer) -> None:
        if trainer.state.evaluation_due:
            trainer.collect()
            self._evaluate_epoch(trainer)

    def after_step(self, trainer: Trainer) -> None:
        due = trainer.is_done or trainer.is_due(trainer.config.training.eval_interval)
        trainer.state.evaluation_due = due
        with trainer.clock.paused():
            # Save first: an evaluation that is interrupted is repeated by the run that resumes.
            if due or not trainer.goes_on:
                trainer.save()
            if due and trainer.goes_on:
                trainer.saver.wait()
                trainer.collect()
                self._evaluate_epoch(trainer)

    def at_end(self, trainer: Trainer) -> None:
        # A finished run that is started again evaluates again, because the files may have changed.
        if trainer.state.evaluation_due and not trainer.config.training.skip_train:
            self._evaluate_epoch(trainer)
        else:
            self._evaluate_files(trainer)

    def _evaluate_epoch(self, trainer: Trainer) -> None:
        """Evaluate and log the accuracy, and keep the checkpoint of this iteration if it is the best."""
        accuracy = self._evaluate_files(trainer)
        trainer.state.evaluation_due = False
        if trainer.config.checkpoint.save is None:
            return
        root, iteration = Path(trainer.config.checkpoint.save), trainer.state.iteration
        try:
            with raise_on_all_ranks(trainer.mesh.world):
                if trainer.mesh.is_first:
                    replace_text(folder_of(root, iteration) / ACCURACY, json.dumps(accuracy, indent=1) + "\n")
                    if accuracy["all"] > best_before(root, iteration):
                        best = keep_best(root, iteration)
                        trainer.log(f"best accuracy so far: {accuracy['all']:.4f}, kept in {best}")
                    trainer.mark_evaluated()
        except OSError as error:
            raise TrainingFault(
                f"--save: the best checkpoint cannot be kept in {root / 'best'}: {error}; run the same command "
                "to try again"
            ) from None

    def _evaluate_files(self, trainer: Trainer) -> dict[str, float]:
        """Evaluate the accuracy on each file and on all. Every process must call it."""
        values: dict[str, float] = {}
        accuracy: dict[str, float] = {}
        shown, correct, total = [], 0, 0
        for name, dataset in trainer.datasets.items():
            if name == TRAIN:
                continue
            samples, arguments = range(len(dataset)), trainer.loader_arguments()
            with trainer.engine.phases("evaluate"):
                found = trainer.engine.evaluate(
                    eval_batches(dataset, trainer.config.data, samples=samples, **arguments)
                )
            values |= {f"{what} {name}": value for what, value in found.items()}
            accuracy[name], count = found["accuracy"], round(found["accuracy"] * len(dataset))
            correct, total = correct + count, total + len(dataset)
            shown.append(f"{name} {found['accuracy']:.4f} ({count:,} of {len(dataset):,})")
        accuracy["all"] = values["accuracy"] = correct / total
        if len(shown) > 1:
            shown.append(f"all {accuracy['all']:.4f}")
        epoch = trainer.state.iteration // trainer.config.training.eval_interval
        when = f"after epoch {epoch}" if self.finetune.epochs else f"of {trainer.config.checkpoint.load}"
        line = f" accuracy {when} | {' | '.join(shown)} |"
        trainer.report_evaluation(
            EvalResult(title=f"evaluation {when}", where=when, values=values, line=line)
        )
        return accuracy


def best_before(root: Path, iteration: int) -> float:
    """Return the best accuracy of earlier epochs, -1 without one.

    A later one belongs to a run that was rolled back since, and does not count.
    """
    try:
        best = newest_iteration(root / "best")
        if best is None or best >= iteration:
            return -1.0
        saved = json.loads((folder_of(root / "best", best) / ACCURACY).read_text(encoding="utf-8"))
        return float(saved["all"])
    except (OSError, ValueError, LookupError, TypeError):  # missing or damaged
        return -1.0
