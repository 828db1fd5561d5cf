"""Shards of a preparation, and merges that check that all of them are there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.data.indexed import IndexedDataset
from megatron.errors import InputError
from megatron.preprocessing import preprocess as module
from megatron.preprocessing.inputs import Input
from megatron.preprocessing.merge import MergeConfig, Merged, merge
from megatron.preprocessing.preprocess import PreprocessConfig, preprocess
from megatron.preprocessing.shards import parse_shard
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.record import read_tokenizer

NULL = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode in this process, which is faster."""

    def map_here(make: type, settings: object, items: Iterator, workers: int) -> Iterator:
        yield from map(make(settings), items)

    monkeypatch.setattr(module, "map_in_order", map_here)


def write(folder: Path, *files: tuple[str, list[int]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, ids in files:
        end = "\n\n" if name.endswith(".txt") else "\n"
        text = "".join((str(i) if end == "\n\n" else json.dumps({"text": str(i)})) + end for i in ids)
        (folder / name).write_text(text)
    return folder


def prepare(source: Path, output: Path, shard: str | None, **flags: object) -> None:
    flags = {"txt_documents": "blank-lines", **flags}
    tokenizer = flags.pop("tokenizer", NULL)
    config = PreprocessConfig(input=(str(source),), output_prefix=str(output), shard=shard, **flags)
    preprocess(config, tokenizer)


def join(source: Path | str, output: Path) -> Merged:
    return merge(MergeConfig(input=str(source), output_prefix=str(output)))


def ids(prefix: Path) -> list[int]:
    return IndexedDataset(prefix).tokens.tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_of_whole_files_equal_one_run(tmp_path: Path, count: int) -> None:
    source = write(tmp_path / "in", *((f"{i}.jsonl", list(range(10 * i, 10 * i + i))) for i in range(7)))
    prepare(source, tmp_path / "whole", None)
    for i in range(1, count + 1):
        prepare(source, tmp_path / "o", f"{i}/{count}")
    merged = join(tmp_path / "o_text_document", tmp_path / "o_text_document")
    assert (merged.shards, merged.bad) == (count, 0)
    for kind in ("bin", "idx"):
        whole, joined = (tmp_path / f"{name}_text_document.{kind}" for name in ("whole", "o"))
        assert joined.read_bytes() == whole.read_bytes()
    assert read_tokenizer(str(tmp_path / "o_text_document")) == read_tokenizer(
        str(tmp_path / "whole_text_document")
    )


@pytest.mark.parametrize("batch", [1, 1 << 20])
def test_shards_of_few_files_take_every_nth_document(
    tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a batch has one document, so that the numbers continue over batches, files and formats."""
    monkeypatch.setattr("megatron.preprocessing.blocks.BATCH_BYTES", batch)
    monkeypatch.setattr("megatron.preprocessing.blocks.BLOCK_BYTES", 20)
    source = write(tmp_path / "in", ("a.jsonl", list(range(5))), ("b.txt", list(range(5, 12))))
    for i in range(1, 4):
        prepare(source, tmp_path / "parts/o", f"{i}/3")
        assert ids(tmp_path / f"parts/o_text_document-0000{i}-of-00003") == list(range(i - 1, 12, 3))
    merged = join(tmp_path / "parts", tmp_path / "merged")
    assert merged.shards == 3 and sorted(ids(tmp_path / "merged")) == list(range(12))


def test_a_file_of_plain_text_goes_to_one_shard_and_others_may_be_empty(tmp_path: Path) -> None:
    source = write(tmp_path / "in", ("a.txt", [1, 2]), ("b.txt", [3]))
    for i in range(1, 5):
        prepare(source, tmp_path / "o", f"{i}/4", txt_documents="file")
    join(tmp_path / "o_text_document", tmp_path / "merged")
    assert ids(tmp_path / "merged") == [1, 2, 3]
    assert len(IndexedDataset(tmp_path / "merged")) == 2


def test_bad_lines_are_counted_over_all_shards(tmp_path: Path) -> None:
    source = write(tmp_path / "in", ("a.jsonl", [1, 2, 3, 4]))
    with (source / "a.jsonl").open("a") as file:
        file.write("bad\n\nbad\n")
    for i in (1, 2):
        prepare(source, tmp_path / "o", f"{i}/2", on_bad_line="skip")
    assert join(tmp_path / "o_text_document", tmp_path / "merged").bad == 2
    assert sorted(ids(tmp_path / "merged")) == [1, 2, 3, 4]


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Prefix of three shards of two files."""
    source = write(tmp_path / "in", ("a.jsonl", [1, 2]), ("b.jsonl", [3]))
    for i in range(1, 4):
        prepare(source, tmp_path / "parts/o", f"{i}/3")
    return tmp_path / "parts/o_text_document"


def refuses(source: Path | str, output: Path, message: str) -> None:
    with pytest.raises(InputError) as error:
        join(source, output)
    assert re.search(message, str(error.value)), error.value
    assert not list(output.parent.glob(f"{output.name}*"))


def test_missing_shards_are_named(parts: Path, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        Path(f"{parts}-00002-of-00003{suffix}").unlink()
    refuses(parts, tmp_path / "m", r"--input: 1 of 3 shards of .*/o_text_document are missing: 2/3; run")
    refuses(parts.parent, tmp_path / "m", "1 of 3 shards")


def test_shards_that_do_not_belong_together(parts: Path, tmp_path: Path) -> None:
    source, second = tmp_path / "in", tmp_path / "parts/o"
    prepare(source, second, "2/3", append_eod=True)
    refuses(
        parts,
        tmp_path / "m",
        r"00002-of-00003 was made with another tokenizer or other flags .*append_eod False",
    )
    other = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=900)
    prepare(source, second, "2/3", tokenizer=other)
    refuses(parts, tmp_path / "m", r"another tokenizer .*\(1,001 ids\).* and NullTokenizer \(901 ids\)")
    write(source, ("b.jsonl", [3, 4]))
    prepare(source, second, "2/3")
    refuses(
        parts,
        tmp_path / "m",
        r"00002-of-00003 was made with inputs of other names or sizes than .* \(2 and 2 inputs\)",
    )
    shutil.copy(source / "a.jsonl", source / "c.jsonl")
    prepare(source, second, "1/4")
    refuses(parts, tmp_path / "m", r"was made with another --shard I/N than .*\(3 and 4 shards\)")


def test_inputs_that_changed_without_changing_their_sizes(parts: Path, tmp_path: Path) -> None:
    (tmp_path / "in/a.jsonl").write_bytes(b'{"text": "1"}'.ljust(len(b'{"text": "1"}\n') * 2 - 1) + b"\n")
    prepare(tmp_path / "in", tmp_path / "parts/o", "2/3")
    refuses(parts, tmp_path / "m", "do not add up to the inputs, which changed while they were prepared")


def test_damaged_and_foreign_files(parts: Path, tmp_path: Path) -> None:
    record = Path(f"{parts}-00002-of-00003.shard.json")
    content = record.read_text()
    record.write_text(content.replace('"tokens": 1', '"tokens": 2'))
    refuses(
        parts,
        tmp_path / "m",
        r"has 1 documents and 1 tokens, but its record 1 and 2; prepare shard 2/3 again",
    )
    for text in ("{}", content.replace('"tokens": 1', '"tokens": "1"'), content.replace("{", "[")):
        record.write_text(text)
        refuses(parts, tmp_path / "m", r"shard.json: is not the record of a shard; prepare")
    record.unlink()
    refuses(parts, tmp_path / "m", r"00002-of-00003.shard.json does not exist; copy it with")
    record.write_text(content)
    prepare(tmp_path / "in", tmp_path / "parts/other", None)
    refuses(parts.parent, tmp_path / "m", r"also .*/other_text_document, .*--input .*/o_text_document$")
    assert join(parts, tmp_path / "m").shards == 3


def test_each_key_is_merged_by_itself(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "1", "title": "2"}\n')
    prepare(tmp_path / "a.jsonl", tmp_path / "o", "1/1", json_keys=("text", "title"))
    assert join(tmp_path / "o_title_document", tmp_path / "m").shards == 1
    assert ids(tmp_path / "m") == [2]


@pytest.mark.parametrize("text", ["0/8", "9/8", "1/0", "1", "1/8/8", "-1/8", "a/b", "1/100000"])
def test_wrong_shards(text: str) -> None:
    with pytest.raises(
        InputError, match=rf"--shard: '{text}' is not I/N with I from 1 to N, such as 1/8 to 8/8"
    ):
        parse_shard(text)


def test_every_input_is_in_one_shard() -> None:
    for inputs in range(1, 20):
        files = [Input(str(i), None) for i in range(inputs)]
        for count in range(1, inputs + 1):
            shards = [parse_shard(f"{i}/{count}") for i in range(1, count + 1)]
            assert [file for shard in shards for file in shard.inputs(files)] == files
            assert all(shard.inputs(files) for shard in shards)
