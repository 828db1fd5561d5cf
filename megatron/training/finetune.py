"""Fine-tuning of BERT on labelled texts: epochs, the accuracy on each file, and the best checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoint.storage import keep_best, newest_iteration, replace_text
from megatron.data.classification import FORMATS, ClassificationDataset, Epochs, Example
from megatron.data.loader import Batch, eval_batches
from megatron.flags import Config, InputError, TrainingFault, flag
from megatron.model.bert import BertClassifier
from megatron.parallel.collectives import together
from megatron.parallel.random import DropoutKey
from megatron.tokenizer import Tokenizer
from megatron.training.config import RunConfig
from megatron.training.loop import Trainer
from megatron.training.task import Part, Relation, Task

BEST = "best.json"


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
    epochs: int = flag(3, "times that the training data is gone through", low=1)
    skip_bad_rows: bool = flag(False, "go on without rows that cannot be used, and tell how many there are")


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

    train = [example for path in config.train_data for example in read(path, "--train-data")]
    names = [Path(path).name for path in config.valid_data]
    # By the last part of a path, where that tells them apart.
    names = names if len(set(names)) == len(names) else list(config.valid_data)
    if len(set(names)) < len(names):
        raise InputError(f"--valid-data: {' '.join(config.valid_data)} names a file twice")
    valid = {name: read(path, "--valid-data") for name, path in zip(names, config.valid_data, strict=True)}
    return Examples(train, valid)


def with_epochs(config: RunConfig, finetune: FinetuneConfig, examples: int, replicas: int) -> RunConfig:
    """The run of so many epochs, which saves and evaluates after each; or that goes on with what --save holds.

    Raises:
        InputError: an epoch is shorter than a batch.
    """
    training, checkpoint = config.training, config.checkpoint
    batch_size = training.global_batch_size or training.micro_batch_size * replicas
    steps = examples // batch_size
    if steps == 0:
        raise InputError(
            f"--train-data: holds {examples} examples, less than a batch of {batch_size} (--global-batch-size, by "
            "default --micro-batch-size on each replica); lower that"
        )
    if checkpoint.save is not None:
        going_on = Path(checkpoint.save).is_dir() and newest_iteration(Path(checkpoint.save)) is not None
        start = checkpoint.save if going_on else checkpoint.load
        checkpoint = dataclasses.replace(
            checkpoint,
            load=start,
            ckpt_step=None if going_on else checkpoint.ckpt_step,
            finetune=not going_on and start is not None,
            save_interval=steps,
        )
    else:
        checkpoint = dataclasses.replace(checkpoint, finetune=checkpoint.load is not None)
    training = dataclasses.replace(
        training, global_batch_size=batch_size, train_iters=finetune.epochs * steps, eval_interval=steps
    )
    return dataclasses.replace(config, training=training, checkpoint=checkpoint)


def finetune_task(finetune: FinetuneConfig, examples: Examples) -> Task:
    """The task of telling the right label of each example."""
    form = FORMATS[finetune.task]

    def build_model(config: RunConfig, part: Part) -> BertClassifier:
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
        config: RunConfig, tokenizer: Tokenizer, samples: tuple[int, int, int]
    ) -> dict[str, ClassificationDataset | Epochs]:
        if tokenizer.name not in ("BertWordPieceLowerCase", "BertWordPieceCase"):
            raise InputError(
                f"--tokenizer-type: {tokenizer.name} has no [CLS] and [SEP]; use BertWordPieceLowerCase or "
                "BertWordPieceCase, with the vocab.txt that the model was pretrained with"
            )
        parallel = config.parallel
        dataset = functools.partial(
            ClassificationDataset,
            tokenizer=tokenizer,
            seq_length=config.data.seq_length,
            keeps_first=form.keeps_first,
            length_multiple=math.lcm(
                8, parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
            ),
        )
        train = Epochs(
            dataset(examples.train),
            epochs=finetune.epochs,
            each=config.training.eval_interval * config.training.global_batch_size,
            seed=config.training.seed,
        )
        return {"train": train, **{name: dataset(found) for name, found in examples.valid.items()}}

    def logits(model: BertClassifier, batch: Batch, hidden: Tensor | None, key: DropoutKey) -> Tensor:
        out = model(batch["text"], batch["padding_mask"], batch["types"], hidden_sbh=hidden, dropout_key=key)
        if model.classification_head is None:
            return out
        return out.float().view(-1, form.choices * form.scores)

    def forward(model: BertClassifier, batch: Batch, hidden: Tensor | None, key: DropoutKey) -> Tensor:
        out = logits(model, batch, hidden, key)
        if model.classification_head is None:
            return out
        return F.cross_entropy(out, batch["labels"], reduction="sum").unsqueeze(0)

    def measured(model: BertClassifier, batch: Batch, hidden: Tensor | None, key: DropoutKey) -> Tensor:
        out = logits(model, batch, hidden, key)
        if model.classification_head is None:
            return out
        right = (out.argmax(1) == batch["labels"]).sum().float()
        return torch.stack((F.cross_entropy(out, batch["labels"], reduction="sum"), right))

    def count(batch: Batch) -> Tensor:
        return torch.tensor([len(batch["labels"])], device=batch["labels"].device)

    task = Task(
        name=f"BERT fine-tuned on {finetune.task}",
        loss_names=("loss",),
        build_model=build_model,
        build_datasets=build_datasets,
        count=count,
        vocab_positions=lambda _: 0,
        forward=forward,
        begins_with=Relation(
            tasks=("BERT", "BERT --bert-no-binary-head"),
            new=("classification_head.", "pooler.", "embedding.tokentype_embeddings."),
            dropped=("lm_head.", "output_layer.", "binary_head."),
        ),
    )
    measure = dataclasses.replace(
        task, loss_names=("loss", "accuracy"), count=lambda batch: count(batch).expand(2), forward=measured
    )
    return dataclasses.replace(task, measure=measure)


@dataclasses.dataclass(kw_only=True)
class FineTuner(Trainer):
    """A run of fine-tuning, which evaluates on whole files after each epoch, and keeps its best checkpoint."""

    accuracy: float | None = None  # on all files, of the epoch that has just ended

    def evaluate_in_between(self) -> None:
        """Evaluate where an epoch ends."""
        if self.due(self.config.training.eval_interval):
            self.collect()
            self.evaluate_files()
        self.progress.evaluation_due = False

    def save(self) -> None:
        """Save a checkpoint; and where an epoch ends, note whether it is the best."""
        super().save()
        if self.accuracy is not None:
            self.saver.wait()
            self.note_best()

    def finish(self) -> None:
        """Evaluate at the end of the last epoch, unless an earlier try has."""
        if self.progress.evaluation_due:
            self.evaluate_files()
            self.note_best()
            self.mark_evaluated()

    def evaluate_files(self) -> None:
        """Tell the accuracy on every file, and on all together."""
        right, total, found = 0, 0, {}
        for name, dataset in self.datasets.items():
            if name == "train":
                continue
            batches = eval_batches(
                dataset, self.config.data, samples=range(len(dataset)), **self.loader_arguments()
            )
            values = self.engine.evaluate(batches)
            here = round(values["accuracy"] * len(dataset))
            right, total = right + here, total + len(dataset)
            found |= {f"accuracy {name}": values["accuracy"], f"loss {name}": values["loss"]}
            found |= {f"right {name}": here, f"examples {name}": len(dataset)}
        self.accuracy = found["accuracy"] = right / total
        epoch = self.progress.iteration // self.config.training.eval_interval
        files = [name for name in self.datasets if name != "train"]
        told = [
            f"{name} {found[f'accuracy {name}']:.4f} ({found[f'right {name}']:,} of {found[f'examples {name}']:,})"
            for name in files
        ]
        told += [f"all {self.accuracy:.4f}"] if len(files) > 1 else []
        self.reporter.measured(
            f" accuracy after epoch {epoch} | {' | '.join(told)} |",
            {name: value for name, value in found.items() if name.split()[0] in ("accuracy", "loss")},
            self.progress.iteration,
            self.progress.consumed_samples,
        )

    def note_best(self) -> None:
        """Keep the checkpoint that has just been saved apart, if it is better than those before. Every process must
        take part."""
        accuracy, self.accuracy = self.accuracy, None
        if self.config.checkpoint.save is None:
            return
        root, iteration = Path(self.config.checkpoint.save), self.progress.iteration
        try:
            with together(self.mesh.world):
                if self.mesh.is_first and accuracy > self.best_before(root, iteration):
                    best = keep_best(root, iteration)
                    replace_text(
                        root / BEST, json.dumps({"iteration": iteration, "accuracy": accuracy}) + "\n"
                    )
                    self.reporter.say(f"best so far, accuracy {accuracy:.4f}: kept in {best}")
        except OSError as error:
            raise TrainingFault(
                f"--save: the best checkpoint cannot be kept in {root / 'best'}: {error}"
            ) from None

    def best_before(self, root: Path, iteration: int) -> float:
        """The best accuracy of the epochs before; a later one, of before the run was taken back, does not count."""
        try:
            noted = json.loads((root / BEST).read_text(encoding="utf-8"))
            return noted["accuracy"] if noted["iteration"] < iteration else -1.0
        except FileNotFoundError:
            return -1.0
