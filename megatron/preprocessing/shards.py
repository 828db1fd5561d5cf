"""Divide the preparation of a corpus among machines, and check that all its parts are there.

Part I of N writes PREFIX-0000I-of-0000N.bin and .idx, and a record beside them: PREFIX-0000I-of-0000N.shard.json.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.data.indexed import IndexedDataset
from megatron.errors import InputError
from megatron.files import read_file
from megatron.preprocessing.inputs import DATASET, Input
from megatron.tokenizer.record import as_json, write_synced

SUFFIX = ".shard.json"
TEMPORARY = f"{SUFFIX}.part"
MAX_SHARDS = 99_999
_NAME = re.compile(r"-\d{5}-of-\d{5}$")


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part `number` of `count`, counted from 1.

    With at least as many inputs as shards, each shard takes whole inputs, consecutive ones, so that all shards in order
    equal one run. With fewer, each shard reads every input and takes every count-th record.
    """

    number: int
    count: int

    @property
    def suffix(self) -> str:
        """End of the output's prefix."""
        return f"-{self.number:05}-of-{self.count:05}"

    def by_inputs(self, inputs: Sequence[Input]) -> bool:
        """True if shards take whole inputs."""
        return len(inputs) >= self.count

    def inputs(self, inputs: Sequence[Input]) -> Sequence[Input]:
        """The inputs that this shard reads."""
        if not self.by_inputs(inputs):
            return inputs
        begin, end = (len(inputs) * i // self.count for i in (self.number - 1, self.number))
        return inputs[begin:end]

    def share(self, inputs: Sequence[Input]) -> tuple[int, int]:
        """The records to take of those inputs: (i, n) takes each whose number is i modulo n."""
        return (0, 1) if self.by_inputs(inputs) else (self.number - 1, self.count)


def parse_shard(text: str) -> Shard:
    """Parse --shard.

    Raises:
        InputError: it is not I/N with 1 <= I <= N.
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count <= MAX_SHARDS:
        raise InputError(
            f"--shard: {text!r} is not I/N with I from 1 to N, such as 1/8 to 8/8 (SLURM: sbatch --array=1-8, "
            f"--shard $SLURM_ARRAY_TASK_ID/8), and N up to {MAX_SHARDS:,}"
        )
    return Shard(number, count)


def fingerprint(inputs: Sequence[Input]) -> str:
    """Digest of the inputs' names and sizes. Machines may have them in different folders."""
    names = [(i.address if i.address.startswith(DATASET) else Path(i.address).name, i.size) for i in inputs]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def stem_of(prefix: str) -> str:
    """The prefix without the end that is a shard's."""
    return _NAME.sub("", prefix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """The source and the counts of a shard, kept beside its .idx file.

    Attributes:
        inputs: number of inputs of the whole preparation, and `digest` their fingerprint.
        own_inputs: number of inputs that this shard read.
        by_inputs: as `Shard.by_inputs`.
        records: records in the inputs that this shard read.
        settings: flags that decide which tokens a text gives.
        documents, sequences, tokens: counts of the shard's files.
        bad: lines that were skipped.
    """

    number: int
    count: int
    inputs: int
    digest: str
    own_inputs: int
    by_inputs: bool
    records: int
    settings: Mapping[str, Any]
    documents: int
    sequences: int
    tokens: int
    bad: int

    def write(self, prefix: str) -> Callable[[], None]:
        """Write the record of the shard at `prefix` under a temporary name; returns a function that renames it."""
        path = Path(prefix + TEMPORARY)
        write_synced(path, as_json(dataclasses.asdict(self)))
        return functools.partial(os.replace, path, prefix + SUFFIX)


def read_record(prefix: str) -> ShardRecord | None:
    """Read the record of the shard at `prefix`; None if it is none.

    Raises:
        InputError: the record is missing though the name is a shard's, or is damaged.
    """
    path = Path(prefix + SUFFIX)
    if not path.exists():
        if stem_of(prefix) != prefix:
            raise InputError(f"{path} does not exist; copy it with the .bin and .idx files of the shard")
        return None
    try:
        found = json.loads(read_file(path))
        record = ShardRecord(**found)
        others = {"digest": str, "settings": dict}
        if not all(isinstance(value, others.get(name, int)) for name, value in vars(record).items()):
            raise ValueError
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError):
        raise InputError(f"{path}: is not the record of a shard; prepare the shard again") from None
    return record


def check_complete(datasets: Sequence[IndexedDataset], records: Sequence[ShardRecord | None]) -> None:
    """Check that token files in the order of their names are all shards of one preparation.

    Raises:
        InputError: names the shards that are missing, or the first that does not belong to the others.
    """
    first, start = records[0], datasets[0].prefix
    stem = stem_of(start)
    for dataset, record in zip(datasets, records, strict=True):
        if first is None or record is None or stem_of(dataset.prefix) != stem:
            shard, other = (start, dataset.prefix) if first else (dataset.prefix, start)
            raise InputError(
                f"--input: the folder holds {shard}, a shard, and also {other}, which belongs to another preparation "
                f"or to none; give the prefix of the shards, as in --input {stem_of(shard)}"
            )
        for name, what, difference in (
            ("count", "another --shard I/N", f"{first.count} and {record.count} shards"),
            ("digest", "inputs of other names or sizes", f"{first.inputs} and {record.inputs} inputs"),
            (
                "settings",
                "another tokenizer or other flags",
                _difference(first.settings, record.settings),
            ),
        ):
            if getattr(record, name) != getattr(first, name):
                raise InputError(
                    f"{dataset.prefix} was made with {what} than {start} ({difference}); prepare all shards with the "
                    "same flags"
                )
        counts = (len(dataset.doc_idx) - 1, len(dataset), dataset.num_tokens)
        if counts != (record.documents, record.sequences, record.tokens):
            raise InputError(
                f"{dataset.prefix} has {counts[0]:,} documents and {counts[2]:,} tokens, but its record "
                f"{record.documents:,} and {record.tokens:,}; prepare shard {record.number}/{record.count} again"
            )
    found = [record for record in records if record]
    count = found[0].count
    missing = sorted(set(range(1, count + 1)) - {record.number for record in found})
    if missing:
        listed = ", ".join(f"{number}/{count}" for number in missing[:10])
        raise InputError(
            f"--input: {len(missing):,} of {count:,} shards of {stem} are missing: {listed}"
            f"{', ...' if len(missing) > 10 else ''}; run `megatron preprocess --shard` for them"
        )
    if found[0].by_inputs:
        complete = sum(record.own_inputs for record in found) == found[0].inputs
    else:
        complete = len({record.records for record in found}) == 1
    if len(found) != count or not complete:
        raise InputError(
            f"--input: the shards of {stem} do not add up to the inputs, which changed while they were prepared; "
            "prepare all shards again"
        )


def _difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Show the entries of two mappings that differ."""
    names = [name for name in first if first[name] != other.get(name)]
    return "; ".join(f"{name} {first[name]} and {other.get(name)}" for name in names)
