"""The tokenizer recorded beside the data: used if no other is given, and compared with another that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.errors import InputError
from megatron.flags import flag
from megatron.settings.tokenizer import FIELDS, HELP
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.record import TokenizerRecord, describe_tokenizer, read_tokenizer
from megatron.training.config import PluginConfig, RunConfig
from megatron.variants.blend_flags import data_prefixes

DATA_FIELDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def add_data_tokenizer(given: dict[str, Any]) -> dict[str, Any]:
    """Add the values of the data's tokenizer to those given, unless these say which tokenizer to use.

    Raises:
        InputError: the files of a blend were made with several tokenizers, or a record is damaged.
    """
    if any(given.get(name) is not None for name in (*FIELDS, "tiktoken_pattern")):
        return given
    records = list(data_records(given))
    if not records:
        return given
    prefix, first = records[0]
    for other, record in records:
        if record.key != first.key:
            raise InputError(
                f"{other} was made with {record}, but {prefix} with {first}; a run has one tokenizer: preprocess the "
                "text of one of them again"
            )
    config = first.config(prefix)
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    values = {name: getattr(config, name) for name in fields if getattr(config, name) != fields[name]}
    notice = f"the tokenizer is that of {prefix}: {first}"
    return values | given | {"notices": [*given["notices"], notice]}


def data_records(values: Mapping[str, Any]) -> Iterator[tuple[str, TokenizerRecord]]:
    """Yield the prefix and the record of each token file that the data flags name, if it has a record."""
    for name in DATA_FIELDS:
        if values.get(name):
            for prefix in data_prefixes(values[name], f"--{name.replace('_', '-')}"):
                record = read_tokenizer(prefix)
                if record:
                    yield prefix, record


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataTokenizerConfig(PluginConfig):
    """The tokenizer by its folder; it must be the one that the data was made with."""

    tokenizer: str | None = flag(None, HELP, metavar="PATH")

    def check(self, run: RunConfig) -> None:
        """Compare the tokenizer of the run with those recorded beside its data.

        Raises:
            InputError: the data was made with another one.
        """
        records = list(data_records(vars(run.data)))
        if all(_is_same(run.tokenizer, record.config(prefix)) for prefix, record in records):
            return
        used = describe_tokenizer(build_tokenizer(run.tokenizer), run.tokenizer)
        for prefix, record in records:
            if record.key != used.key:
                raise InputError(
                    f"{prefix} was made with {record}, but the tokenizer of this run is {used}; leave out the "
                    "tokenizer's flags to train with that of the data, or preprocess the text again"
                )


def _is_same(used: TokenizerConfig, recorded: TokenizerConfig) -> bool:
    """True if the run uses the recorded copies."""
    padding = used.make_vocab_size_divisible_by
    return used == dataclasses.replace(recorded, make_vocab_size_divisible_by=padding)
