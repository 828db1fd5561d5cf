"""Training a vocabulary: content of the files, and determinism."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from megatron.errors import InputError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.config import TokenizerConfig
from megatron.tokenizer.train import train_bpe, train_wordpiece

TEXTS = [topics[name] for name in sorted(topics)]


def write(folder: Path, contents: dict[str, str]) -> Path:
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def test_bpe_files_are_consistent(tmp_path):
    folder = write(tmp_path, train_bpe(TEXTS, 600))
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    merges = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    assert list(vocab.values()) == list(range(600))
    assert list(vocab)[-1] == "<|endoftext|>"
    assert len(merges) == 1 + 600 - 256 - 1
    assert [line.replace(" ", "") for line in merges[1:]] == list(vocab)[256:-1], "ids follow the merges"

    gpt2 = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )
    tokenizer = build_tokenizer(gpt2)
    assert (tokenizer.vocab_size, tokenizer.eod) == (600, 599)
    text = "".join(TEXTS)
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert len(ids) < 0.6 * len(text)


@pytest.mark.parametrize(
    ("lowercase", "kind"), [(True, "BertWordPieceLowerCase"), (False, "BertWordPieceCase")]
)
def test_wordpiece_covers_its_text(tmp_path, lowercase, kind):
    folder = write(tmp_path, train_wordpiece(lambda: TEXTS, 1000, lowercase=lowercase))
    config = TokenizerConfig(tokenizer_type=kind, vocab_file=str(folder / "vocab.txt"))
    tokenizer = build_tokenizer(config)
    assert tokenizer.vocab[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.vocab_size == 1000 + 2
    assert any(piece.lower() != piece for piece in tokenizer.vocab[5:1000]) != lowercase
    ids = tokenizer.tokenize("".join(TEXTS))
    assert tokenizer.vocab.index("[UNK]") not in ids
    assert "".join(tokenizer.vocab[i] for i in ids[:200]).count("##") < 130


def test_training_is_deterministic():
    """The library seeds its hash tables for each training, so a single process can show differences between runs."""
    assert train_bpe(TEXTS, 600) == train_bpe(TEXTS, 600)
    first = train_wordpiece(lambda: TEXTS, 1000, lowercase=True)
    assert all(train_wordpiece(lambda: TEXTS, 1000, lowercase=True) == first for _ in range(3))


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [
        (256, "--vocab-size: 256 is too small; single characters and special tokens alone need 257"),
        (10**6, r"--vocab-size: 1000000 is too large for this text, which yields \d+ pieces"),
    ],
)
def test_vocab_size_that_the_text_does_not_yield(vocab_size, message):
    with pytest.raises(InputError, match=message):
        train_bpe(TEXTS, vocab_size)


def test_wordpiece_vocab_size_that_the_text_does_not_yield():
    with pytest.raises(InputError, match="--vocab-size: 6 is too small"):
        train_wordpiece(lambda: TEXTS, 6, lowercase=True)
