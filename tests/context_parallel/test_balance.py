"""Blocks of the ranks that divide packed documents, and their work, counted as pairs of a query and a key."""

from __future__ import annotations

import dataclasses
import itertools
import re
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.context_parallel.blocks import MAX_BLOCKS, Block, blocks, pairs_mask
from megatron.data.zigzag import Zigzag
from megatron.ops.attention import MaskSpec, make_mask
from megatron.ops.cpu.document_attention import MERGED_LENGTH
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


def work(ids: np.ndarray, zigzag: Zigzag) -> np.ndarray:
    """Pairs of each rank, [size], where a query attends to the earlier keys of its document and itself."""
    position = np.arange(len(ids))
    starts = np.concatenate(([True], ids[1:] != ids[:-1]))
    pairs = position - np.maximum.accumulate(np.where(starts, position, 0)) + 1
    total = pairs.cumsum()
    ranges = [zigzag.ranges(rank) for rank in range(zigzag.size)]
    before = np.concatenate(([0], total))
    return np.array([sum(before[end] - before[begin] for begin, end in chunks) for chunks in ranges])


def imbalance(samples: list[np.ndarray], zigzag: Zigzag) -> float:
    """Percent by which the busiest ranks of all samples together have more pairs than the mean."""
    counts = np.array([work(ids, zigzag) for ids in samples])
    return 100 * (counts.max(1).sum() / counts.mean(1).sum() - 1)


def add_block(
    counts_bst: Tensor, block: Block, spec: MaskSpec, zigzag: Zigzag, ranks: tuple[int, int]
) -> int:
    """Count the pairs of a block in a mask of the whole sequence. Returns the pairs that are computed."""
    query_s, key_t = (
        zigzag.positions(rank, torch.arange(*rows))
        for rank, rows in zip(ranks, (block.queries, block.keys), strict=True)
    )
    mask_bnst = pairs_mask(block, spec, zigzag, *ranks)
    if mask_bnst is None:
        mask_bnst = torch.ones(1, 1, len(query_s), len(key_t), dtype=torch.bool)
    if block.causal:
        assert torch.equal(query_s, key_t)
        mask_bnst = mask_bnst.tril()
    sequences = slice(None) if block.sequences is None else slice(*block.sequences)
    part_bst = counts_bst[sequences]
    part_bst[:, query_s.unsqueeze(1), key_t] += mask_bnst.squeeze(1).int()
    computed = mask_bnst if block.causal else torch.ones_like(mask_bnst)
    return int(computed[0].sum()) * len(part_bst)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["CPU", "GPU"])
@pytest.mark.parametrize("window", [None, 40], ids=["all keys", "window"])
@pytest.mark.parametrize("size", [2, 4])
def test_each_pair_is_in_one_block(
    size: int, window: int | None, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of all ranks together are the mask of the whole sequence, with little that it leaves out."""
    length, random = 1024, np.random.RandomState(2)
    # Documents of a token, of hundreds, and as long as the sequence.
    starts = np.stack([random.rand(length) < 0.02, np.arange(length) > 2, np.zeros(length)])
    starts[1, 40:] = 0
    ids_bs = torch.from_numpy(starts.astype(int)).cumsum(1)
    spec = MaskSpec(length=length, window=window, document_ids_bs=ids_bs, device=CPU)
    zigzag = Zigzag.of(length, size, documents=True)
    assert zigzag.segments == 8 // size
    told = spec
    if on_gpu:  # where ids cannot be read
        told = dataclasses.replace(spec, document_ids_bs=types.SimpleNamespace(is_cuda=True))
    counts_bst, computed, number = torch.zeros(3, length, length, dtype=torch.int), 0, 0
    for ranks in itertools.product(range(size), repeat=2):
        for block in blocks(told, zigzag, *ranks):
            computed += add_block(counts_bst, block, spec, zigzag, ranks)
            number += 1
    expected = make_mask(spec).squeeze(1).int()
    assert torch.equal(counts_bst, expected)
    if on_gpu:
        assert number <= MAX_BLOCKS * size**2
    elif window is None:
        assert computed < 1.1 * int(expected.sum())


def test_the_work_of_the_blocks_is_that_of_the_formula() -> None:
    """Without short documents, which are computed together, a CPU computes no other pairs."""
    lengths = np.array([200, 65, 300, 70, 389])
    assert min(lengths) > MERGED_LENGTH and lengths.sum() == 1024
    ids = np.repeat(np.arange(5), lengths)
    spec = MaskSpec(length=1024, document_ids_bs=torch.from_numpy(ids).unsqueeze(0), device=CPU)
    zigzag = Zigzag.of(1024, 4, documents=True)
    counts, ranks = torch.zeros(1, 1024, 1024, dtype=torch.int), range(4)
    computed = [
        sum(
            add_block(counts, block, spec, zigzag, (rank, source))
            for source in ranks
            for block in blocks(spec, zigzag, rank, source)
        )
        for rank in ranks
    ]
    assert computed == work(ids, zigzag).tolist()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mean", [256, 1024, 4096])
def test_the_work_of_random_documents_is_balanced(mean: int, size: int) -> None:
    """Lengths are exponential; within 10% of the mean, and one segment is further from it than many."""
    random = np.random.RandomState(mean)
    samples = [
        np.repeat(np.arange(len(lengths)), lengths)[:8192]
        for lengths in (random.exponential(mean, 8192 * 8 // mean).astype(int) + 1 for _ in range(30))
    ]
    segments = imbalance(samples, Zigzag.of(8192, size, documents=True))
    assert segments < 10 and 2 * segments < imbalance(samples, Zigzag(8192, size))


@pytest.mark.slow
def test_the_figures_of_the_documentation(shared: Path) -> None:
    """The busiest rank of each sample has that many percent more than the mean, over all samples."""
    tokenizer = GPT2BPETokenizer(shared / "data/gpt2-vocab.json", shared / "data/gpt2-merges.txt")
    text = (shared / "data/wt2-train.txt").read_text(encoding="utf-8")
    articles = re.split(r"(?m)^(?= = [^=].*[^=] = $)", text)
    lengths = np.array([len(tokenizer.tokenize(x)) + 1 for x in articles if x.strip()])
    page = (Path(__file__).parents[2] / "docs" / "long-context.md").read_text(encoding="utf-8")
    cell = r" (\d+)%, (\d+\.\d)% \|"
    rows = re.findall(rf"^\| (\w\S*) \| ([\d,]+) \|{cell * 3}$", page, re.M)
    assert len(rows) == 4
    for packing, tokens, *stated in rows:
        length = int(tokens.replace(",", ""))
        samples = list(document_ids(lengths, length, packing))
        for size, halves, segments in zip((2, 4, 8), stated[::2], stated[1::2], strict=True):
            assert abs(imbalance(samples, Zigzag(length, size)) - int(halves)) < 0.6
            more = imbalance(samples, Zigzag.of(length, size, documents=True))
            assert abs(more - float(segments)) < 0.06 and more < 10
