"""Fine-tuning of BERT on labelled texts: epochs, the accuracy on each file, and the best checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.storage import folder_of, keep_best, newest_iteration, replace_text
from megatron.data.classification import FORMATS, ClassificationDataset, Epochs, Example, Format
from megatron.data.loader import Batch, eval_batches
from megatron.flags import Config, InputError, TrainingFault, flag
from megatron.model.bert import BertClassifier
from megatron.parallel.collectives import together
from megatron.parallel.random import DropoutKey
from megatron.tokenizer import Tokenizer
from megatron.training.config import RunConfig
from megatron.training.loop import Trainer
from megatron.training.task import Measure, Part, Relation, Task

# In the folder of a checkpoint: what it reaches on each file.
ACCURACY = "accuracy.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Config):
    """What to fine-tune on, and for how long."""

    task: str = flag(None, "data set that the files are of", choices=tuple(FORMATS), required=True)
    train_data: tuple[str, ...] = flag(
        None,
        "files to train on: TSV with the columns of GLUE (MNLI, QQP), or for RACE folders of .txt files or files "
        "with a JSON object on each line",
        nargs="+",
        metavar="PATH",
        required=True,
    )
    valid_data: tuple[str, ...] = flag(
        None,
        "files of the same kind to tell the accuracy on after each epoch",
        nargs="+",
        metavar="PATH",
        required=True,
    )
    epochs: int = flag(
        3,
        "times that the training data is gone through; 0 tells the accuracy of --load and trains nothing",
        low=0,
    )
    skip_bad_rows: bool = flag(False, "go on without rows that cannot be used, and tell how many there are")


# The data set that is trained on, among those that are evaluated on, which have the names of files.
TRAIN = "train"


@dataclasses.dataclass(frozen=True)
class Examples:
    """What the files of a fine-tuning run hold: all examples to train on, and to evaluate on those of each path."""

    train: list[Example]
    valid: dict[str, list[Example]]


def read_examples(config: FinetuneConfig, say: Callable[[str], None]) -> Examples:
    """Read all files; `say` tells people what has been found.

    Raises:
        InputError: naming the file, and the row.
    """
    form = FORMATS[config.task]

    def read(path: str, flag: str) -> list[Example]:
        bad: list[str] = []
        found = form.read(Path(path), bad.append if config.skip_bad_rows else None)
        if not found:
            raise InputError(f"{flag}: {path} holds no examples")
        say(f"{flag} {path}: {len(found):,} examples" + (f"; {len(bad):,} bad rows skipped" if bad else ""))
        for fault in bad[:3]:
            say(f"  {fault}")
        return found

    # By the last part of a path, where that tells them apart.
    names = [Path(path).name for path in config.valid_data]
    paths = [str(Path(path).resolve()) for path in config.valid_data]
    if len(set(names)) < len(names) or TRAIN in names:
        names = paths
    if len(set(paths)) < len(paths):
        raise InputError(f"--valid-data: {' '.join(config.valid_data)} names a file twice")
    train = [example for path in config.train_data for example in read(path, "--train-data")]
    valid = {name: read(path, "--valid-data") for name, path in zip(names, config.valid_data, strict=True)}
    return Examples(train, valid)


def holds_run(folder: str | None) -> bool:
    """Whether there is a run in the folder of --save, to be continued."""
    return folder is not None and Path(folder).is_dir() and newest_iteration(Path(folder)) is not None


def with_epochs(
    config: RunConfig, finetune: FinetuneConfig, examples: int, replicas: int, say: Callable[[str], None]
) -> RunConfig:
    """The run of so many epochs, which saves and evaluates after each; or that goes on with what --save holds.

    Raises:
        InputError: an epoch is shorter than a batch, or batches are not those that the run began with.
    """
    training, checkpoint = config.training, config.checkpoint
    if finetune.epochs == 0 and (checkpoint.save is not None or checkpoint.load is None):
        raise InputError(
            "--epochs: 0 tells the accuracy of a checkpoint; give its folder to --load, and no --save"
        )
    going_on = holds_run(checkpoint.save)
    batch_size = training.global_batch_size
    if going_on:
        begun = find_checkpoint(checkpoint.save, checkpoint.save, verify=False).state["config"]
        trained = begun.get("fine-tuning", {}).get("train_data")
        if trained != list(finetune.train_data):
            say(
                f"--train-data: {trained} there, {list(finetune.train_data)} here: other examples from here on"
            )
        before = begun.get("training", {}).get("global_batch_size", batch_size)
        if batch_size not in (None, before):
            raise InputError(
                f"--global-batch-size: {batch_size} is not the {before} that the run in {checkpoint.save} began with, "
                "which its epochs are counted in; leave the flag out, or choose another folder"
            )
        batch_size = before
    batch_size = batch_size or training.micro_batch_size * replicas
    steps = examples // batch_size
    if steps == 0:
        raise InputError(
            f"--train-data: holds {examples} examples, less than a batch of {batch_size} (--global-batch-size, by "
            "default --micro-batch-size on each replica); lower that"
        )
    apart = (
        None in (checkpoint.load, checkpoint.save)
        or Path(checkpoint.load).resolve() != Path(checkpoint.save).resolve()
    )
    checkpoint = dataclasses.replace(
        checkpoint,
        load=checkpoint.save if going_on else checkpoint.load,
        ckpt_step=None if going_on and apart else checkpoint.ckpt_step,
        finetune=not going_on and checkpoint.load is not None,
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


def finetune_task(finetune: FinetuneConfig, examples: Examples) -> Task:
    """The task of telling the right label of each example."""
    form = FORMATS[finetune.task]
    return Task(
        name=f"BERT fine-tuned on {finetune.task}",
        loss_names=("loss",),
        build_model=functools.partial(build_model, form),
        build_datasets=functools.partial(build_datasets, finetune, examples),
        count=count,
        vocab_positions=lambda _: 0,
        forward=functools.partial(forward, form, measured=False),
        measure=Measure(
            names=("loss", "accuracy"),
            count=lambda batch: count(batch).expand(2),
            forward=functools.partial(forward, form, measured=True),
        ),
        begins_with=Relation(
            tasks=("BERT", "BERT --bert-no-binary-head"),
            new=("classification_head.", "pooler.", "embedding.tokentype_embeddings."),
            dropped=("lm_head.", "output_layer.", "binary_head."),
        ),
    )


def build_model(form: Format, config: RunConfig, part: Part) -> BertClassifier:
    return BertClassifier(
        config.model,
        scores=form.scores,
        vocab_size=part.vocab_size,
        padded_vocab_size=part.padded_vocab_size,
        chunk=part.chunk,
        tp=part.tp,
        recompute=part.recompute,
    )


def build_datasets(
    finetune: FinetuneConfig,
    examples: Examples,
    config: RunConfig,
    tokenizer: Tokenizer,
    samples: tuple[int, int, int],
) -> dict[str, ClassificationDataset | Epochs]:
    if tokenizer.name not in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        raise InputError(
            f"--tokenizer-type: {tokenizer.name} has no [CLS] and [SEP]; use BertWordPieceLowerCase or "
            "BertWordPieceCase, with the vocab.txt that the model was pretrained with"
        )
    dataset = functools.partial(
        ClassificationDataset,
        tokenizer=tokenizer,
        seq_length=config.data.seq_length,
        keeps_first=FORMATS[finetune.task].keeps_first,
        length_multiple=config.parallel.length_multiple,
    )
    train = Epochs(
        dataset(examples.train),
        epochs=max(1, finetune.epochs),
        each=config.training.eval_interval * config.training.global_batch_size,
        seed=config.training.seed,
    )
    return {TRAIN: train, **{name: dataset(found) for name, found in examples.valid.items()}}


def count(batch: Batch) -> Tensor:
    return batch["labels"].new_full((1,), len(batch["labels"]))


def forward(
    form: Format,
    model: BertClassifier,
    batch: Batch,
    hidden: Tensor | None,
    dropout_key: DropoutKey,
    *,
    measured: bool,
) -> Tensor:
    """The sum of the losses, [1]; if `measured`, with the number of right answers, [2]."""
    out = model(
        batch["text"],
        batch.get("padding_mask"),
        batch["types"],
        hidden_sbh=hidden,
        dropout_key=dropout_key,
    )
    if model.classification_head is None:
        return out
    logits, labels = out.float().view(-1, form.choices * form.scores), batch["labels"]
    sums = [F.cross_entropy(logits, labels, reduction="sum")]
    if measured:
        sums.append((logits.argmax(1) == labels).sum().float())
    return torch.stack(sums)


@dataclasses.dataclass(kw_only=True)
class FineTuner(Trainer):
    """A run of fine-tuning, which saves after each epoch, evaluates on whole files, and keeps its best checkpoint."""

    finetune: FinetuneConfig
    length_flags: ClassVar[str] = "--epochs"
    evaluates_again: ClassVar[bool] = True

    def pause(self, *, goes_on: bool) -> None:
        """Save where an epoch ends, then evaluate: what is interrupted in between, the run that resumes does again."""
        if self.progress.evaluation_due or not goes_on:
            self.save()
        if self.progress.evaluation_due and goes_on:
            self.saver.wait()
            self.evaluate_in_between()

    def evaluate_in_between(self) -> None:
        """Evaluate the checkpoint of an epoch that has ended."""
        self.collect()
        self.evaluate_epoch()

    def finish(self) -> None:
        """Evaluate at the end of the last epoch; if an earlier try has, again, for the files may be others."""
        if self.progress.evaluation_due and not self.config.training.skip_train:
            self.evaluate_epoch()
        else:
            self.evaluate_files()

    def state(self) -> dict[str, Any]:
        """As of `Trainer`, and what was fine-tuned on."""
        state = super().state()
        state["config"]["fine-tuning"] = dataclasses.asdict(self.finetune)
        return state

    def evaluate_epoch(self) -> None:
        """Tell the accuracy on every file and on all, and keep the checkpoint of this iteration if it is the best."""
        accuracy = self.evaluate_files()
        self.progress.evaluation_due = False
        if self.config.checkpoint.save is None:
            return
        root, iteration = Path(self.config.checkpoint.save), self.progress.iteration
        try:
            with together(self.mesh.world):
                if self.mesh.is_first:
                    replace_text(folder_of(root, iteration) / ACCURACY, json.dumps(accuracy, indent=1) + "\n")
                    if accuracy["all"] > best_before(root, iteration):
                        best = keep_best(root, iteration)
                        self.reporter.say(f"best so far, accuracy {accuracy['all']:.4f}: kept in {best}")
                    self.mark_evaluated()
        except OSError as error:
            raise TrainingFault(
                f"--save: the best checkpoint cannot be kept in {root / 'best'}: {error}; the same command tries again"
            ) from None

    def evaluate_files(self) -> dict[str, float]:
        """The accuracy on every file and on all. Every process must take part."""
        values, told, right, total = {}, [], 0, 0
        accuracy = {}
        for name, dataset in self.datasets.items():
            if name == TRAIN:
                continue
            batches = eval_batches(
                dataset, self.config.data, samples=range(len(dataset)), **self.loader_arguments()
            )
            with self.timed("evaluate"):
                found = self.engine.evaluate(batches)
            values |= {f"{what} {name}": value for what, value in found.items()}
            accuracy[name], here = found["accuracy"], round(found["accuracy"] * len(dataset))
            right, total = right + here, total + len(dataset)
            told.append(f"{name} {found['accuracy']:.4f} ({here:,} of {len(dataset):,})")
        accuracy["all"] = values["accuracy"] = right / total
        if len(told) > 1:
            told.append(f"all {accuracy['all']:.4f}")
        epoch = self.progress.iteration // self.config.training.eval_interval
        when = f"after epoch {epoch}" if self.finetune.epochs else f"of {self.config.checkpoint.load}"
        self.reporter.measured(
            f" accuracy {when} | {' | '.join(told)} |",
            values,
            self.progress.iteration,
            self.progress.consumed_samples,
        )
        return accuracy


def best_before(root: Path, iteration: int) -> float:
    """The best accuracy of the epochs before; a later one, of before the run was taken back, does not count."""
    try:
        best = newest_iteration(root / "best")
        if best is None or best >= iteration:
            return -1.0
        noted = json.loads((folder_of(root / "best", best) / ACCURACY).read_text(encoding="utf-8"))
        return float(noted["all"])
    except (OSError, ValueError, LookupError, TypeError):  # not there, or not whole: any is better
        return -1.0
