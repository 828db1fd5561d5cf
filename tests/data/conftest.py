"""Small token files for the tests of the data path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter


@pytest.fixture
def write_documents(tmp_path: Path) -> Callable[..., IndexedDataset]:
    """Writes documents of several sequences, given as lists of lists of ids, and opens the files."""

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
    """Writes documents of one sequence each, given as lists of ids, and opens the files."""

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
    """50 documents of 0 to 40 tokens; ids count up through all of them, so that each is one of its kind."""
    sizes = np.random.RandomState(0).randint(0, 41, size=50)
    tokens = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    return write(tokens)
