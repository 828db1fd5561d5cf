"""The tokenizer of a folder or file, and the flag --tokenizer."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from megatron.errors import InputError
from megatron.settings.tokenizer import TokenizerFlags, expand_tokenizer, tokenizer_config
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.detect import detect_tokenizer
from megatron.tokenizer.train import train_bpe, train_wordpiece

TEXTS = ["the hen and the hat", "The 2 hats"]
SPECIAL = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"


def write(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def bpe() -> dict[str, str]:
    """The files of a trained BPE."""
    return train_bpe(iter(TEXTS), 262)


def kind(path: Path) -> str | None:
    config = detect_tokenizer(str(path))
    assert "the" in build_tokenizer(config).detokenize(build_tokenizer(config).tokenize("the hat"))
    return config.tokenizer_type


def test_the_output_of_train_tokenizer(bpe: dict[str, str], tmp_path: Path) -> None:
    assert kind(write(tmp_path / "bpe", bpe)) == "GPT2BPETokenizer"
    for lowercase, name in ((True, "BertWordPieceLowerCase"), (False, "BertWordPieceCase")):
        files = train_wordpiece(lambda: iter(TEXTS), 25 - 3 * lowercase, lowercase=lowercase)
        assert kind(write(tmp_path / name, files)) == name


def test_a_byte_level_bpe(bpe: dict[str, str], tmp_path: Path) -> None:
    files = {name: bpe[name] for name in ("vocab.json", "merges.txt")}
    folder = write(tmp_path / "files", files)
    assert kind(folder) == kind(folder / "vocab.json") == kind(folder / "merges.txt") == "GPT2BPETokenizer"
    folder = write(tmp_path / "fast", {"tokenizer.json": bpe["tokenizer.json"]})
    assert kind(folder) == kind(folder / "tokenizer.json") == "HuggingFaceTokenizer"


def test_bert(tmp_path: Path) -> None:
    folder = write(tmp_path / "bert", {"vocab.txt": SPECIAL + "the\nhat\n"})
    assert kind(folder) == kind(folder / "vocab.txt") == "BertWordPieceLowerCase"
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert kind(folder) == "BertWordPieceCase"


def test_sentence_piece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = write(tmp_path / "sp", {"text": "\n".join(TEXTS * 20)})
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=30,
        minloglevel=9,
        hard_vocab_limit=False,
    )
    assert kind(folder) == kind(folder / "m.model") == "SentencePieceTokenizer"


def test_tiktoken(tmp_path: Path) -> None:
    ranks = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    folder = write(tmp_path / "tik", {"a.tiktoken": ranks, "list.json": []})
    assert detect_tokenizer(str(folder / "list.json")).tokenizer_type == "TikTokenizer"
    config = tokenizer_config({"tokenizer": str(folder / "a.tiktoken"), "tiktoken_pattern": "cl100k"})
    assert build_tokenizer(config).tokenize("ab") == [97, 98]
    with pytest.raises(InputError, match="--tiktoken-pattern is required"):
        build_tokenizer(tokenizer_config({"tokenizer": str(folder / "a.tiktoken")}))


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"^--tokenizer: \S+/none does not exist; give a folder or file \(names on"
    ):
        detect_tokenizer(str(tmp_path / "none"))
    folder = write(tmp_path / "other", {"README.md": "x", "config.json": {}, "vocab.json": {}})
    for path in (folder, folder / "README.md", folder / "config.json", folder / "vocab.json"):
        with pytest.raises(InputError, match=rf"^--tokenizer: {path} is no tokenizer; give a folder with"):
            detect_tokenizer(str(path))
    pieces = [*sorted(ByteLevel.alphabet()), "<|endoftext|>"]
    gpt2 = {"vocab.json": {piece: i for i, piece in enumerate(pieces)}, "merges.txt": ""}
    folder = write(tmp_path / "added", gpt2 | {"added_tokens.json": {"<|im_start|>": 257}})
    with pytest.raises(
        InputError, match=r"adds 1 tokens, such as '<\|im_start\|>', that its GPT2BPETokenizer lacks"
    ):
        detect_tokenizer(str(folder))


def test_the_flag_stands_for_type_and_files(bpe: dict[str, str], tmp_path: Path) -> None:
    folder = write(tmp_path / "bpe", bpe)
    given = {"tokenizer": str(folder), "make_vocab_size_divisible_by": 1, "lr": 1.0}
    assert tokenizer_config(given) == TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
        make_vocab_size_divisible_by=1,
    )
    assert expand_tokenizer(given)["lr"] == 1.0 and expand_tokenizer({"lr": 1.0}) == {"lr": 1.0}
    assert TokenizerFlags(tokenizer="a").tokenizer == "a"
    for name in ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model"):
        flag = "--" + name.replace("_", "-")
        with pytest.raises(
            InputError, match=f"^--tokenizer and {flag} exclude each other; --tokenizer gives"
        ):
            expand_tokenizer({**given, name: "x"})
