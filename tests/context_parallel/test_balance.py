"""Work of the ranks that divide packed documents, counted as pairs of a query and a key of its document."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.context_parallel.blocks import blocks
from megatron.data.zigzag import zigzag_ranges
from megatron.ops.attention import MaskSpec
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.variants.best_fit import build_index

CPU = torch.device("cpu")


def document_ids(lengths: np.ndarray, seq_length: int, packing: str) -> Iterator[np.ndarray]:
    """Yield the number of the document at each position of the samples of an epoch."""
    if packing == "concatenated":
        order = np.random.RandomState(1).permutation(len(lengths))
        ids = np.repeat(np.arange(len(lengths)), lengths[order])
        yield from ids[: len(ids) // seq_length * seq_length].reshape(-1, seq_length)
        return
    documents = range(len(lengths))
    sequences, offsets, starts, _ = build_index(lengths.astype(np.int32), documents, seq_length, 1, seed=1)
    pieces = np.minimum(lengths[sequences] - offsets, seq_length + 1)
    for begin, end in itertools.pairwise(starts):
        sample = np.repeat(np.arange(end - begin), pieces[begin:end])[:seq_length]
        yield np.pad(sample, (0, seq_length - len(sample)), constant_values=end - begin)  # padding


def work(ids: np.ndarray, size: int) -> np.ndarray:
    """Pairs of each rank, [size], where a query attends to the earlier keys of its document and itself."""
    position = np.arange(len(ids))
    starts = np.concatenate(([True], ids[1:] != ids[:-1]))
    pairs = position - np.maximum.accumulate(np.where(starts, position, 0)) + 1
    total = pairs.cumsum()
    ranges = [zigzag_ranges(len(ids), rank, size) for rank in range(size)]
    before = np.concatenate(([0], total))
    return np.array([sum(before[end] - before[begin] for begin, end in chunks) for chunks in ranges])


@pytest.mark.parametrize("size", [2, 4])
def test_the_blocks_have_the_pairs_of_the_formula(size: int) -> None:
    ids = np.sort(np.random.RandomState(2).randint(0, 9, 128))
    spec = MaskSpec(length=128, document_ids_bs=torch.from_numpy(ids).unsqueeze(0), device=CPU)
    counted = [
        sum(
            int(block.mask_bnst.sum()) for source in range(size) for block in blocks(spec, rank, source, size)
        )
        for rank in range(size)
    ]
    assert counted == work(ids, size).tolist()


@pytest.mark.slow
def test_the_figures_of_the_documentation(shared: Path) -> None:
    """The busiest rank of each sample has that many percent more than the mean, over all samples."""
    tokenizer = GPT2BPETokenizer(shared / "data/gpt2-vocab.json", shared / "data/gpt2-merges.txt")
    text = (shared / "data/wt2-train.txt").read_text(encoding="utf-8")
    articles = re.split(r"(?m)^(?= = [^=].*[^=] = $)", text)
    lengths = np.array([len(tokenizer.tokenize(x)) + 1 for x in articles if x.strip()])
    page = (Path(__file__).parents[2] / "docs" / "long-context.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w\S*) \| ([\d,]+) \| (\d+)% \| (\d+)% \|$", page, re.M)
    assert len(rows) == 4
    for packing, seq_length, *stated in rows:
        samples = list(document_ids(lengths, int(seq_length.replace(",", "")), packing))
        for size, percent in zip((2, 4), stated, strict=True):
            counts = np.array([work(ids, size) for ids in samples])
            more = 100 * (counts.max(1).sum() / counts.mean(1).sum() - 1)
            assert abs(more - int(percent)) < 0.6, (packing, seq_length, size, more)
