"""Describe and check a pair of token files (PREFIX.bin and PREFIX.idx).

    megatron inspect-data my/corpus_text_document --show 2

The tokenizer is the one recorded beside the files, unless its flags are given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.data.indexed import IndexedDataset
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.settings.tokenizer import TokenizerFlags, tokenizer_config
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.record import read_tokenizer

CHUNK_TOKENS = 1 << 22  # checked at a time
MAX_CHARACTERS = 1000  # printed of a document
SAMPLED_DOCUMENTS = 1000  # of which the last token is checked


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectConfig(Config):
    """Documents to print."""

    show: int = flag(0, "print the text of the first N documents; needs a tokenizer", low=0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("prefix", metavar="PREFIX", help="path of the files without .bin or .idx")
    add_flags(parser, InspectConfig, "output")
    add_flags(
        parser,
        TokenizerFlags,
        "tokenizer (default: that of the files), or --vocab-size alone, to check the ids",
    )
    args = vars(parser.parse_args(argv))
    config, chosen = make_config(InspectConfig, args), tokenizer_config(args)
    record = read_tokenizer(args["prefix"])
    if chosen.tokenizer_type is None and record:
        chosen = record.config(args["prefix"])
    tokenizer = build_tokenizer(chosen) if chosen.tokenizer_type else None
    if config.show and tokenizer is None:
        raise InputError(
            "--show needs the tokenizer of the files, which have no record of it: --tokenizer, or --tokenizer-type and "
            "its files"
        )
    vocab_size = tokenizer.vocab_size if tokenizer else chosen.vocab_size

    dataset = IndexedDataset(args["prefix"])
    describe(dataset)
    if record:
        print(f"tokenizer  {record}")
    check_ids(dataset, vocab_size)
    if tokenizer is None:
        return
    describe_ends(dataset, tokenizer)
    for i in range(min(config.show, len(dataset.doc_idx) - 1)):
        text = tokenizer.detokenize(document(dataset, i).tolist())
        print(f"--- document {i}\n{text[:MAX_CHARACTERS]}{' [...]' if len(text) > MAX_CHARACTERS else ''}")


def describe(dataset: IndexedDataset) -> None:
    sizes, documents = dataset.sizes, np.diff(dataset.doc_idx)
    print(f"{dataset.prefix}: format version 1, {dataset.dtype.name}")
    print(f"documents  {len(documents):,}")
    print(f"sequences  {len(sizes):,}")
    print(f"tokens     {dataset.num_tokens:,}")
    if len(sizes):
        print(f"tokens in a sequence    {sizes.min():,} to {sizes.max():,}, {sizes.mean():,.1f} on average")
    if len(documents):
        print(
            f"sequences in a document {documents.min():,} to {documents.max():,}, "
            f"{documents.mean():,.1f} on average"
        )


def check_ids(dataset: IndexedDataset, vocab_size: int | None) -> None:
    """Print the range of the token ids.

    Raises:
        InputError: an id is negative, or not below `vocab_size`.
    """
    tokens = np.empty(0, dataset.dtype)
    if dataset.num_tokens:  # an empty file cannot be mapped
        tokens = np.memmap(dataset.bin_path, dtype=dataset.dtype, mode="r")
    low, high = 0, 0
    for start in range(0, len(tokens), CHUNK_TOKENS):
        part = tokens[start : start + CHUNK_TOKENS]
        low, high = min(low, int(part.min())), max(high, int(part.max()))
        limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
        if low < 0 or high >= limit:
            at = start + int(np.argmax((part < 0) | (part >= limit)))
            sequence = int(np.searchsorted(np.cumsum(dataset.sizes, dtype=np.int64), at, side="right"))
            bound = "not negative" if vocab_size is None else f"0 to {vocab_size - 1}"
            raise InputError(
                f"{dataset.bin_path}: token {at} (in sequence {sequence}) is {tokens[at]}; ids must be {bound}"
            )
    print(f"highest id {high:,}{'' if vocab_size is None else f', of {vocab_size:,} ids'}")


def describe_ends(dataset: IndexedDataset, tokenizer: Tokenizer) -> None:
    """Print how many of the first documents end with the end-of-document token."""
    if "eod" not in tokenizer.special_ids:
        return
    first = [document(dataset, i) for i in range(min(SAMPLED_DOCUMENTS, len(dataset.doc_idx) - 1))]
    ends = sum(bool(len(tokens)) and int(tokens[-1]) == tokenizer.eod for tokens in first)
    print(f"end-of-document token at the end of {ends:,} of the first {len(first):,} documents")


def document(dataset: IndexedDataset, i: int) -> np.ndarray:
    """The tokens of all sequences of document `i`."""
    sequences = [dataset.get(j) for j in range(dataset.doc_idx[i], dataset.doc_idx[i + 1])]
    return np.concatenate(sequences) if sequences else np.empty(0, dataset.dtype)


if __name__ == "__main__":
    run_command(main)
