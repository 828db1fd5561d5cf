"""Training data of a run that goes on beyond the length that the order of its samples was made for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.data.batch import Batch
from megatron.data.dataset import Dataset
from megatron.training.loop import Hook, Trainer
from megatron.training.start import run_length
from megatron.variants.blend_flags import phases_after


class Extension(Hook):
    """Extend the training data of a run whose --train-iters or --train-samples was raised.

    Samples keep their order. Extensions double the data, whatever the length of the run, so that the order also stays
    when the run is extended again.
    """

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        config, state = trainer.config, trainer.state
        _, samples = run_length(config, trainer.batch_schedule, state.iteration, state.consumed_samples)
        # With --dataloader-type cyclic the data has no end.
        if "train" in trainer.datasets and config.data.dataloader_type != "cyclic":
            datasets = [trainer.datasets["train"]]
            while (size := sum(map(len, datasets))) < samples:
                datasets.append(_build(trainer, len(datasets), size))
            if len(datasets) > 1:
                trainer.datasets["train"] = JoinedDataset(datasets)
                trainer.log(
                    f"the run was started for {state.train_samples:,} samples and extended to {samples:,}, which "
                    f"does not change the order of the first {len(datasets[0]):,}; after them the training data is "
                    "shuffled anew"
                )
        yield


def _build(trainer: Trainer, number: int, samples: int) -> Dataset:
    """Build `samples` samples for an extension after `samples` samples, in an order of its own."""
    data, seed = trainer.config.data, (trainer.config.training.seed + number) % 2**32
    training = dataclasses.replace(trainer.config.training, seed=seed)
    paths: dict[str, Any] = {
        name: tuple(phases_after(getattr(data, name), f"--{name.replace('_', '-')}", samples))
        for name in ("data_path", "train_data_path")
        if getattr(data, name) is not None
    }
    data = dataclasses.replace(data, **paths)
    config = dataclasses.replace(trainer.config, training=training, data=data)
    return trainer.task.build_datasets(config, trainer.tokenizer, (samples, 0, 0))["train"]


@dataclasses.dataclass
class JoinedDataset:
    """Samples of several datasets of one kind, one dataset after the other."""

    datasets: Sequence[Dataset]

    def __len__(self) -> int:
        return sum(map(len, self.datasets))

    def __getitem__(self, i: int) -> Any:
        for dataset in self.datasets[:-1]:
            if i < len(dataset):
                return dataset[i]
            i -= len(dataset)
        return self.datasets[-1][i]

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Make a batch of samples, as any of the datasets does."""
        return self.datasets[0].collate(samples)
