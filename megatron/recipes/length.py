"""The length of a run in tokens or epochs, as a number of samples."""

from __future__ import annotations

import dataclasses
import fractions
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.errors import InputError
from megatron.flags import flag
from megatron.recipes.config import RampUpConfig
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import PluginConfig, RunConfig
from megatron.variants.blend_flags import check_phases, parse_blend, split_phases

if TYPE_CHECKING:
    from megatron.training.task import Task

LENGTHS = ("train_iters", "train_samples", "train_tokens", "train_epochs")
UNTIL_KNOWN = 1  # value of --train-samples until the data, and so the length of an epoch, is known


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthConfig(PluginConfig):
    """Length of the run in tokens or epochs."""

    train_tokens: int | None = flag(
        None, "tokens to train for, instead of --train-iters: as many whole samples and batches as fit", low=1
    )
    train_epochs: float | None = flag(
        None,
        "passes over the training data to train for, instead of --train-iters. In a blend with weights an epoch has as "
        "many samples as all its files, sampled by weight",
        above=0,
    )

    def check(self, run: RunConfig) -> None:
        """Check that there is a length, and the phases into which the data flags divide the run."""
        if run.training.train_iters is None and run.training.train_samples is None:
            raise InputError(
                "--train-iters, --train-samples, --train-tokens or --train-epochs is required: how long to train"
            )
        check_phases(run.data)
        flags = ("--data-path", run.data.data_path), ("--train-data-path", run.data.train_data_path)
        for name, values in flags:
            if self.train_epochs is not None and len(split_phases(values or (), name)) > 1:
                raise InputError(
                    f"--train-epochs: {self.train_epochs:g} has no meaning with phases in {name}, which begin after a "
                    "number of samples; use --train-samples"
                )


def replace_default_length(given: dict[str, Any]) -> dict[str, Any]:
    """Set the default lengths to None if a length is given, in whatever unit.

    Raises:
        InputError: several lengths are given.
    """
    lengths = [name for name in LENGTHS if given.get(name) is not None]
    if not lengths:
        return given
    if len(lengths) > 1:
        first, second, *_ = lengths
        raise InputError(
            f"{_flag(second)}: {given[second]} does not go with {_flag(first)} {given[first]}; give only one length"
        )
    return given | {name: given.get(name) for name in LENGTHS}


def length_in_samples(values: dict[str, Any]) -> dict[str, Any]:
    """Add the --train-samples that --train-tokens stands for to all values, or a placeholder for --train-epochs.

    Raises:
        InputError: the length is less than a batch, or does not go with a learning-rate schedule in iterations.
    """
    length = next((name for name in ("train_tokens", "train_epochs") if values.get(name) is not None), None)
    if length is None:
        return values
    # Checks the values.
    LengthConfig(train_tokens=values.get("train_tokens"), train_epochs=values.get("train_epochs"))
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if values.get(f"{name}_iters"):
            raise InputError(
                f"{_flag(name)}-iters: {values[f'{name}_iters']} does not go with {_flag(length)}; use "
                f"{_flag(name)}-samples"
            )
    samples = UNTIL_KNOWN
    if length == "train_tokens":
        samples = values["train_tokens"] // values["seq_length"]
        smallest = _first_batch(values)
        if samples < smallest and not values.get("skip_train"):
            raise InputError(
                f"--train-tokens: {values['train_tokens']} is less than a batch of {smallest} samples of --seq-length "
                f"{values['seq_length']} tokens; give at least {smallest * values['seq_length']}"
            )
    return values | {"train_iters": None, "train_samples": max(samples, 1)}


def _first_batch(values: Mapping[str, Any]) -> int:
    """The samples of the first batch, of one replica unless the batch size is given."""
    ramp = values.get("rampup_batch_size") or (None,)
    return ramp[0] or values.get("global_batch_size") or values.get("micro_batch_size") or 1


def with_epochs(config: RunConfig, task: Task) -> RunConfig:
    """Return the configuration with the samples that --train-epochs stands for, if it is given.

    Raises:
        InputError: the data has no epochs, or cannot be read.
    """
    epochs, data = config.plugin(LengthConfig).train_epochs, config.data
    if epochs is None:
        return config
    from megatron.tokenizer import build_tokenizer

    if data.mock_data:
        raise InputError(f"--train-epochs: {epochs:g} has no meaning with --mock-data; use --train-iters")
    name = "train_data_path" if data.data_path is None else "data_path"
    prefixes, _ = parse_blend(getattr(data, name) or (), f"--{name.replace('_', '-')}")
    tokenizer = build_tokenizer(config.tokenizer)
    per_epoch = 0
    for prefix in prefixes:
        paths: dict[str, Any] = {name: (prefix,)}
        alone = dataclasses.replace(config, data=dataclasses.replace(data, **paths))
        # The dataset of one sample has all of the first epoch.
        per_epoch += len(task.build_datasets(alone, tokenizer, (1, 0, 0))["train"])
    # In decimals: 0.29 x 100 is 28.999999999999996 as float64, which would lose a sample.
    samples = int(fractions.Fraction(str(epochs)) * per_epoch)
    batch = _first_batch(vars(config.training) | vars(config.plugin(RampUpConfig)))
    if samples < batch and not config.training.skip_train:
        raise InputError(
            f"--train-epochs: {epochs:g} of the {per_epoch} samples of an epoch is less than a batch of {batch}"
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"--train-epochs {epochs:g}: {samples:,} samples, {per_epoch:,} in an epoch", flush=True)
    training = dataclasses.replace(config.training, train_samples=max(samples, 1))
    return dataclasses.replace(config, training=training)


def check_length(config: RunConfig, batch_schedule: BatchSchedule) -> None:
    """Check that the samples of a run fill a batch.

    Raises:
        InputError: they do not.
    """
    length, samples = config.plugin(LengthConfig), config.training.train_samples
    batch = batch_schedule.batch_size(0)
    if samples is None or samples >= batch or config.training.skip_train:
        return
    given = f"--train-samples: {samples} is"
    if length.train_tokens is not None:
        given = f"--train-tokens: {length.train_tokens} are {samples} samples,"
    elif length.train_epochs is not None:
        if samples == UNTIL_KNOWN:
            return
        given = f"--train-epochs: {length.train_epochs:g} are {samples} samples,"
    raise InputError(f"{given} less than a batch of {batch} samples; raise it or lower the batch size")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
