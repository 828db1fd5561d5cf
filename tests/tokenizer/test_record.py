"""The record of a tokenizer beside a token file: which tokenizers are equal, moved and damaged records."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from megatron.errors import InputError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.record import TokenizerRecord, describe_tokenizer, read_tokenizer, write_tokenizer
from megatron.tokenizer.train import train_bpe

TEXTS = ["the hen and the hat", "The 2 hats"]


def save(folder: Path, size: int = 262) -> Path:
    folder.mkdir()
    for name, content in train_bpe(iter(TEXTS), size).items():
        (folder / name).write_text(content)
    return folder


def gpt2(folder: Path) -> TokenizerConfig:
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **files)


def record(config: TokenizerConfig, prefix: Path | None = None) -> TokenizerRecord:
    tokenizer = build_tokenizer(config)
    made = describe_tokenizer(tokenizer, config)
    if prefix is not None:
        write_tokenizer(str(prefix), made, {file.name: file for file in tokenizer.files})()
    return made


def test_a_record_survives_a_move_without_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "tokenizer")
    configs = {
        "gpt2": gpt2(folder),
        "folder": TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)),
        "null": TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=7),
    }
    (tmp_path / "data").mkdir()
    built = {}
    for name, config in configs.items():
        built[name] = build_tokenizer(dataclasses.replace(config, make_vocab_size_divisible_by=1))
        record(config, tmp_path / "data" / name)
    shutil.rmtree(folder)
    (tmp_path / "data").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    for name, tokenizer in built.items():
        found = read_tokenizer(f"moved/{name}")
        assert found is not None
        copied = build_tokenizer(found.config(f"moved/{name}"))
        assert (copied.name, copied.vocab_size, copied.special_ids) == (
            tokenizer.name,
            tokenizer.vocab_size,
            tokenizer.special_ids,
        )
        assert copied.tokenize("1 2") == tokenizer.tokenize("1 2")
        assert found.key == describe_tokenizer(copied, found.config(f"moved/{name}")).key
    assert read_tokenizer("moved/none") is None


def test_equal_tokenizers(tmp_path: Path) -> None:
    folder, other = save(tmp_path / "a"), save(tmp_path / "b", 261)
    shutil.copytree(folder, tmp_path / "c")
    first = record(gpt2(folder))
    assert (
        first.key == record(gpt2(tmp_path / "c")).key and first.digest == record(gpt2(tmp_path / "c")).digest
    )
    padded = dataclasses.replace(gpt2(folder), make_vocab_size_divisible_by=8, vocab_size=262)
    assert first.key == record(padded).key
    assert first.key != record(gpt2(other)).key
    fast = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    assert first.key != record(fast).key
    # A chat template changes no ids; another end-of-document token does.
    before = record(fast)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "x"}))
    assert before.key == record(fast).key
    (folder / "chat_template.jinja").write_text("x")
    assert before.key == record(fast).key and "chat_template.jinja" in record(fast).files
    assert str(before) == str(record(fast))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "a"}))
    assert before.key != record(fast).key


def test_ids_that_text_never_gives_do_not_count(tmp_path: Path) -> None:
    """With --vocab-size BERT's tokenizer has no [BOS] and [EOS]."""
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nx\n")
    bert = TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file=str(tmp_path / "vocab.txt"))
    assert record(bert).key == record(dataclasses.replace(bert, vocab_size=6)).key
    lower = dataclasses.replace(bert, tokenizer_type="BertWordPieceLowerCase")
    assert record(bert).key != record(lower).key


def test_an_older_record_is_replaced(tmp_path: Path) -> None:
    record(gpt2(save(tmp_path / "a")), tmp_path / "o")
    null = record(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=7), tmp_path / "o")
    assert read_tokenizer(str(tmp_path / "o")) == null
    assert [file.name for file in (tmp_path / "o.tokenizer").iterdir()] == ["record.json"]


def test_a_record_can_be_made_of_its_own_copies(tmp_path: Path) -> None:
    record(gpt2(save(tmp_path / "a")), tmp_path / "o")
    first = read_tokenizer(str(tmp_path / "o"))
    assert first is not None
    record(first.config(str(tmp_path / "o")), tmp_path / "o")
    assert read_tokenizer(str(tmp_path / "o")) == first
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "o.tokenizer"]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": 2}', '{"format": 1, "flags": 3}', "PATH", "FILES", "SIZE", "TYPE"],
)
def test_damaged_records(content: str, tmp_path: Path) -> None:
    record(gpt2(save(tmp_path / "a")), tmp_path / "o")
    path = tmp_path / "o.tokenizer/record.json"
    good = json.loads(path.read_text())
    if content == "PATH":
        content = json.dumps(good | {"flags": good["flags"] | {"vocab_file": "../a/vocab.json"}})
    elif content == "FILES":
        content = json.dumps(good | {"files": {"../a/vocab.json": "x"}})
    elif content == "SIZE":
        content = json.dumps(good | {"vocab_size": "259"})
    elif content == "TYPE":
        content = json.dumps(good | {"type": 3})
    path.write_text(content)
    with pytest.raises(
        InputError, match=r"o\.tokenizer/record\.json: is not the record of a tokenizer; copy the"
    ):
        read_tokenizer(str(tmp_path / "o"))


def test_changed_and_missing_files(tmp_path: Path) -> None:
    record(gpt2(save(tmp_path / "a")), tmp_path / "o")
    merges = tmp_path / "o.tokenizer/merges.txt"
    merges.write_text(merges.read_text() + "x y\n")
    with pytest.raises(
        InputError, match=r"o\.tokenizer/merges\.txt: was changed after the data was made; copy the"
    ):
        read_tokenizer(str(tmp_path / "o"))
    merges.unlink()
    with pytest.raises(InputError, match=r"o\.tokenizer/merges\.txt: cannot be read: No such file"):
        read_tokenizer(str(tmp_path / "o"))
