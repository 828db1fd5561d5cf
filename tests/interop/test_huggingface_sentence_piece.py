"""The tokenizer.json of an export gives the ids of the SentencePiece model that it was made from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hf_models import save_hf

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.tokenizer import saved_tokenizer
from megatron.commands.convert_checkpoint import main
from megatron.errors import InputError
from megatron.inference.conversion import LINES, compare_tokenizers
from megatron.interop.convert import write_native
from megatron.interop.huggingface.read import open_huggingface
from megatron.interop.huggingface.sentence_piece import to_tokenizer_json
from megatron.interop.huggingface.write import write_huggingface
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig

TEXTS = (
    *LINES,
    "",
    "   ",
    "\n",
    " one",
    "▁one ▁ two",
    "the <unk> and <0x41>, <<unk><unk>",
    "hen<sep> hen <sep>  hen<sep><sep>",
    " <sep>",
    "x" * 300,
)
CORPUS = [f"The {n} hens of house {n * n} counted {n % 7} eggs, didn't they?" for n in range(300)] + [
    *LINES[:4],
    "aa aaa aaaa",
]
CHATML = "<sep>,<|im_start|>"


def train(folder: Path, kind: str = "unigram", **settings: object) -> Path:
    """Train a SentencePiece model of up to 600 pieces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "m"),
        model_type=kind,
        vocab_size=600,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return folder / "m.model"


def export(folder: Path, family: str = "llama", **settings: object) -> tuple[Checkpoint, Path]:
    """Export a model with a SentencePiece tokenizer; returns it and the written folder."""
    config = TokenizerConfig(
        tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(train(folder / "theirs", **settings))
    )
    save_hf(folder / "theirs", family, vocab_size=build_tokenizer(config).vocab_size)
    write_native(open_huggingface(folder / "theirs"), folder / "native", lambda n: None)
    native = find_checkpoint(str(folder / "native"), None)
    write_huggingface(native, folder / "written", lambda n: None)
    return native, folder / "written"


@pytest.mark.parametrize("byte_fallback", [True, False], ids=["bytes", "unknown"])
@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
@pytest.mark.parametrize(
    ("normalization", "prefix", "user"),
    [("nmt_nfkc", True, CHATML), ("nmt_nfkc", False, ""), ("identity", True, CHATML), ("identity", True, "")],
    ids=["user-defined", "no prefix", "identity and user-defined", "identity"],
)
def test_ids(
    tmp_path: Path, kind: str, byte_fallback: bool, normalization: str, prefix: bool, user: str
) -> None:
    model = train(
        tmp_path,
        kind,
        byte_fallback=byte_fallback,
        normalization_rule_name=normalization,
        remove_extra_whitespaces=normalization == "nmt_nfkc",
        add_dummy_prefix=prefix,
        user_defined_symbols=user,
        pad_id=3,
    )
    (tmp_path / "tokenizer.json").write_text(to_tokenizer_json(model) or "")
    theirs, ours = (
        build_tokenizer(TokenizerConfig(tokenizer_type=name, tokenizer_model=str(file)))
        for name, file in (
            ("SentencePieceTokenizer", model),
            ("HuggingFaceTokenizer", tmp_path / "tokenizer.json"),
        )
    )
    assert ours.vocab_size == theirs.vocab_size
    for text in (*TEXTS, *(["<|im_start|>hen"] if kind == "unigram" else [])):
        ids = theirs.tokenize(text)
        assert ours.tokenize(text) == ids, text
        assert 0 in ids or ours.detokenize(ids) == theirs.detokenize(ids), text


@pytest.mark.parametrize(
    ("kind", "family", "settings"),
    [
        ("unigram", "llama", {"byte_fallback": True, "pad_id": 3}),
        ("unigram", "qwen3", {"byte_fallback": False, "user_defined_symbols": CHATML}),
        ("bpe", "llama", {"byte_fallback": True, "user_defined_symbols": CHATML + ",[MASK]"}),
        ("bpe", "phi3", {"byte_fallback": False, "normalization_rule_name": "identity"}),
        ("bpe", "qwen3", {"byte_fallback": True, "control_symbols": "[CLS],[SEP]"}),
        ("bpe", "gpt2", {"byte_fallback": True, "add_dummy_prefix": False}),
    ],
)
def test_exports(tmp_path: Path, kind: str, family: str, settings: dict) -> None:
    """AutoTokenizer and our own reader give the ids and the special tokens of the model."""
    transformers = pytest.importorskip("transformers")
    native, written = export(tmp_path, family, **({"kind": kind} | settings))
    expected = build_tokenizer(saved_tokenizer(native))
    read_back = build_tokenizer(saved_tokenizer(open_huggingface(written)))
    auto = transformers.AutoTokenizer.from_pretrained(written)
    assert (expected.name, read_back.name) == ("SentencePieceTokenizer", "HuggingFaceTokenizer")
    for text in TEXTS:
        ids = expected.tokenize(text)
        assert auto.encode(text) == read_back.tokenize(text) == ids, text
    assert read_back.vocab_size == expected.vocab_size == len(auto)
    assert read_back.special_ids == expected.special_ids
    assert (auto.eos_token_id, auto.pad_token_id) == (expected.eos, expected.special_ids.get("pad"))
    assert compare_tokenizers(written, expected) == (
        "token ids of 8 texts equal those of AutoTokenizer of transformers, but special tokens written in a text, such "
        "as '<s>', are ordinary text for SentencePieceTokenizer"
    )
    copy = written / ("m.model" if kind == "unigram" else "tokenizer.model")
    assert copy.read_bytes() == (tmp_path / "theirs" / "m.model").read_bytes()
    # llama.cpp takes these from here only; it adds a beginning token and a space by default.
    config = json.loads((written / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is False
    assert ("add_prefix_space" in config) == (settings.get("add_dummy_prefix") is False)
    added = {
        int(i): (token["content"], token["special"]) for i, token in config["added_tokens_decoder"].items()
    }
    if kind == "bpe":
        user = set(settings.get("user_defined_symbols", "").split(",")) - {""}
        assert {text for text, special in added.values() if not special} == user
    assert all(auto.convert_ids_to_tokens(i) == text for i, (text, _) in added.items())


def test_qwen2_exports_are_read_by_another_class(tmp_path: Path) -> None:
    """AutoTokenizer of transformers 5 replaces any tokenizer of a qwen2 by its own; the conversion says so."""
    transformers = pytest.importorskip("transformers")
    native, written = export(tmp_path, "qwen2", byte_fallback=True)
    expected = build_tokenizer(saved_tokenizer(native))
    line = compare_tokenizers(written, expected)
    if isinstance(transformers.AutoTokenizer.from_pretrained(written), transformers.Qwen2Tokenizer):
        assert line.startswith(
            "warning: AutoTokenizer of transformers gives other ids than SentencePieceTokenizer"
        )
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(written)
    for text in TEXTS:
        assert fast.encode(text) == expected.tokenize(text), text


@pytest.mark.parametrize("installed", [True, False])
def test_the_conversion_says_what_was_compared(tmp_path: Path, monkeypatch, capsys, installed: bool) -> None:
    export(tmp_path)
    if not installed:
        monkeypatch.setitem(sys.modules, "transformers", None)
    main(
        ["--from", "native", "--to", "huggingface"]
        + ["--load", str(tmp_path / "native"), "--save", str(tmp_path / "converted")]
    )
    out = capsys.readouterr().out
    assert ("\ntoken ids of 8 texts equal those of AutoTokenizer" in out) == installed
    assert ("\nwarning: nothing was compared with transformers: " in out) != installed
    assert (tmp_path / "converted" / "tokenizer.json").is_file()


def test_shared_model(shared: Path, tmp_path: Path) -> None:
    """On a published model of 1,000 pieces."""
    file = shared / "data/sentencepiece-test_model.model"
    (tmp_path / "tokenizer.json").write_text(to_tokenizer_json(file) or "")
    theirs = build_tokenizer(
        TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(file))
    )
    ours = build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    )
    for text in (*TEXTS, *(shared / "data/wt2-test.txt").read_text().splitlines()[:300]):
        assert ours.tokenize(text) == theirs.tokenize(text), text


def test_a_model_without_an_equivalent_is_copied(tmp_path: Path, caplog) -> None:
    _, written = export(tmp_path, kind="word")
    assert {file.name for file in written.iterdir()} == {"config.json", "m.model", "model.safetensors"}
    assert "m.model: has no equivalent tokenizer.json" in caplog.text
    assert json.loads((written / "config.json").read_text())["eos_token_id"] == 2
    assert saved_tokenizer(open_huggingface(written)).tokenizer_type == "SentencePieceTokenizer"


def test_without_protobuf(tmp_path: Path, monkeypatch) -> None:
    model = train(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    with pytest.raises(InputError, match=r"m\.model: converting .* needs libraries .*; pip install"):
        to_tokenizer_json(model)
