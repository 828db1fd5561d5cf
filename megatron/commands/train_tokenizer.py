"""Train a tokenizer: a byte-level BPE for GPT, or a WordPiece vocabulary for BERT.

megatron train-tokenizer --input 'my/*.jsonl' --type bpe --vocab-size 32000 --output my/tokenizer
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.preprocessing.documents import documents, read_batches
from megatron.preprocessing.inputs import Input, find_inputs, total_size
from megatron.preprocessing.progress import Progress
from megatron.tokenizer.train import train_bpe, train_wordpiece
from megatron.tool import check_not_root

LOG_INTERVAL = 100_000  # documents


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig(Config):
    """The text and the kind of tokenizer."""

    input: tuple[str, ...] = flag(
        None,
        "files, folders, patterns, addresses or datasets, as of `megatron preprocess`",
        nargs="+",
        metavar="INPUT",
        required=True,
    )
    json_key: str = flag(
        "text", "key of the JSON objects, or column of the parquet files, with the text", metavar="KEY"
    )
    type: str = flag(
        None, "GPT-2's byte-level BPE, or BERT's WordPiece", choices=("bpe", "wordpiece"), required=True
    )
    vocab_size: int = flag(None, "number of token ids, special tokens included", low=1, required=True)
    cased: bool = flag(False, "wordpiece: distinguish upper and lower case (for BertWordPieceCase)")
    output: str = flag(None, "folder to write the files to", metavar="DIR", required=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add_flags(parser, TrainTokenizerConfig, "training")
    config = make_config(TrainTokenizerConfig, vars(parser.parse_args(argv)))
    if config.cased and config.type == "bpe":
        raise InputError("--cased: a BPE always distinguishes upper and lower case; leave the flag out")
    check_not_root("--output", config.output)
    inputs = find_inputs(config.input)
    for source in inputs:
        if (
            config.type == "wordpiece"
            and os.path.exists(source.address)
            and not os.path.isfile(source.address)
        ):
            raise InputError(
                f"--input: {source.address} is a pipe, which can be read once, but a WordPiece is trained in two "
                "passes; write the text to a file"
            )
    if config.type == "bpe":
        contents = train_bpe(read_texts(inputs, config.json_key), config.vocab_size)
    else:
        contents = train_wordpiece(
            lambda: read_texts(inputs, config.json_key), config.vocab_size, lowercase=not config.cased
        )
    write_files(Path(config.output), contents)
    print(f"{config.output}: {', '.join(contents)}; {config.vocab_size:,} ids")


def read_texts(inputs: Sequence[Input], key: str) -> Iterator[str]:
    """Yield the text of all documents.

    Raises:
        InputError: a file or a line is malformed.
    """
    addresses = [source.address for source in inputs]
    # On a terminal the trainer draws its own progress bars.
    with Progress(total_size(inputs), LOG_INTERVAL) as progress:
        # A tokenizer needs no ends of documents, and paragraphs take less memory than files.
        for batch in read_batches(addresses, [key], "blank-lines"):
            found, bad = documents(batch, [key])
            if bad:
                raise InputError(bad[0])
            texts = [text for document in found for text in document.texts]
            yield from texts
            progress.update(len(texts), sum(map(len, texts)), batch.read)


def write_files(folder: Path, contents: dict[str, str]) -> None:
    """Write files under temporary names, and rename them once all are on disk."""
    partial = {folder / name: folder / f"{name}.partial" for name in contents}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for path, temporary in partial.items():
                with open(temporary, "w", encoding="utf-8") as file:
                    file.write(contents[path.name])
                    file.flush()
                    os.fsync(file.fileno())
            for path, temporary in partial.items():
                os.replace(temporary, path)
        finally:
            for temporary in partial.values():
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"--output: {folder} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    run_command(main)
