"""Small token files and a tokenizer for the data tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.tokenizer.bert import BertWordPieceTokenizer


@pytest.fixture
def write_documents(tmp_path: Path) -> Callable[..., IndexedDataset]:
    """Function that writes documents of several sequences, given as lists of lists of ids, and opens the files."""

    def _write(
        documents: Sequence[Sequence[Sequence[int] | np.ndarray]], name: str = "corpus"
    ) -> IndexedDataset:
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for document in documents:
                writer.add_document(document)
        return IndexedDataset(tmp_path / name)

    return _write


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., IndexedDataset]:
    """Function that writes documents of one sequence each, given as lists of ids, and opens the files."""

    def _write(
        documents: Sequence[Sequence[int] | np.ndarray], name: str = "corpus", dtype: type = np.uint16
    ) -> IndexedDataset:
        with IndexedDatasetWriter(tmp_path / name, dtype) as writer:
            for document in documents:
                writer.add_document([document])
        return IndexedDataset(tmp_path / name)

    return _write


@pytest.fixture
def corpus(write: Callable[..., IndexedDataset]) -> IndexedDataset:
    """50 documents of 0 to 40 tokens with ids that count up through all of them, so that no id repeats."""
    sizes = np.random.RandomState(0).randint(0, 41, size=50)
    tokens = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    return write(tokens)


@pytest.fixture
def sentences(write_documents: Callable[..., IndexedDataset]) -> IndexedDataset:
    """40 documents of 0 to 39 sentences of 1 to 19 tokens, with ids 5 to 1999."""
    rng = np.random.RandomState(0)
    return write_documents(
        [[rng.randint(5, 2000, size=rng.randint(1, 20)) for _ in range(n)] for n in range(40)]
    )


@pytest.fixture
def bert_tokenizer(tmp_path: Path) -> BertWordPieceTokenizer:
    """WordPiece tokenizer of 2,002 ids; the pieces from 1,500 on continue a word."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces += [f"w{i}" if i < 1500 else f"##w{i}" for i in range(5, 2000)]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    return BertWordPieceTokenizer(str(tmp_path / "vocab.txt"), lowercase=True)
