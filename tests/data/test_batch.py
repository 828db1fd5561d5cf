from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from classification import write_vocab

from megatron.data.batch import Batch
from megatron.data.config import DataConfig
from megatron.data.zigzag import Zigzag
from megatron.finetuning.classification import ClassificationDataset, Example
from megatron.tokenizer.bert import BertWordPieceTokenizer
from megatron.variants.mock_data import MockBertDataset, MockGPTDataset


@pytest.fixture
def batches(tmp_path) -> dict[str, Batch]:
    """A batch of two samples from each kind of dataset."""
    config = DataConfig(seq_length=16, reset_attention_mask=True)
    tokenizer = BertWordPieceTokenizer(str(write_vocab(tmp_path / "vocab.txt")), lowercase=True)
    pair = (("the river", "a bird"),)
    datasets = {
        "gpt": MockGPTDataset(samples=9, config=config, vocab_size=50, seed=(1, 0), eod=3),
        "bert": MockBertDataset(9, config, vocab_size=50, seed=(1, 0)),
        "classification": ClassificationDataset(
            [Example(pair * 2, 0), Example(pair * 2, 1)],
            tokenizer,
            seq_length=16,
            keeps_first=False,
            length_multiple=8,
        ),
    }
    return {name: dataset.collate([dataset[0], dataset[1]]) for name, dataset in datasets.items()}


def same(ours: Batch, theirs: Batch) -> bool:
    pairs = list(zip(ours.items(), theirs.items(), strict=True))
    return type(ours) is type(theirs) and all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "fields", "sequences"),
    [
        ("gpt", {"labels", "loss_mask", "position_ids"}, 2),
        ("bert", {"tokentype_ids", "padding_mask", "position_ids"}, 2),
        ("classification", {"tokentype_ids", "padding_mask"}, 4),
    ],
)
def test_fields_declare_their_sequence_dimension(
    batches: dict[str, Batch], name: str, fields: set[str], sequences: int
) -> None:
    batch = batches[name]
    metadata = {field.name: field.metadata for field in dataclasses.fields(batch)}
    dims = {field: entry["sequence_dim"] for field, entry in metadata.items() if entry}
    assert set(dims) == {"tokens", "document_ids"} | fields
    assert batch.num_sequences == sequences
    for field, tensor in batch.items():
        if field in dims:
            assert tensor.shape[dims[field]] == batch.seq_length


def test_pickle_copy_and_map(batches: dict[str, Batch]) -> None:
    for batch in batches.values():
        copy = pickle.loads(pickle.dumps(batch))  # noqa: S301, pickled here
        assert same(copy, batch)
        for _, tensor in copy.items():
            tensor.zero_()  # writable, as --cuda-graph and in-place operations need
        assert not same(copy, batch)
        assert same(batch.to(torch.device("cpu"), non_blocking=True), batch)
        assert {x.device.type for _, x in batch.to(torch.device("meta")).items()} == {"meta"}
        assert [name for name, _ in batch.map(torch.zeros_like).items()] == [
            name for name, _ in batch.items()
        ]


def test_missing_field_stays_missing(batches: dict[str, Batch]) -> None:
    batch = MockGPTDataset(samples=9, config=DataConfig(seq_length=8), vocab_size=50, seed=(1, 0)).collate([])
    for same_kind in (batch, batch.map(torch.ones_like), pickle.loads(pickle.dumps(batch))):  # noqa: S301
        assert same_kind.document_ids is None and "document_ids" not in dict(same_kind.items())


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_divide_the_predictions_of_bert_by_position(size: int) -> None:
    """Every masked word and its label is on the rank of its position, once, and the pairs count on one rank."""
    dataset = MockBertDataset(9, DataConfig(seq_length=64), vocab_size=50, seed=(1, 0))
    batch = dataset.collate([dataset[i] for i in range(8)])
    expected = {
        (row, int(at), int(label))
        for row in range(8)
        for at, label, mask in zip(batch.positions[row], batch.labels[row], batch.loss_mask[row], strict=True)
        if mask
    }
    found, pairs = [], torch.zeros(8)
    index = torch.arange(batch.seq_length).expand_as(batch.tokens)
    for rank in range(size):
        part = batch.divide(rank, size)
        where = Zigzag(batch.seq_length, size).shard(index, 1, rank)
        for row, column in part.loss_mask.nonzero().tolist():
            local = part.positions[row, column]
            found.append((row, int(where[row, local]), int(part.labels[row, column])))
            assert part.tokens[row, local] == batch.tokens[row, where[row, local]]
        pairs += part.pair_mask
    assert sorted(found) == sorted(expected) and len(found) > 40
    assert pairs.tolist() == [1.0] * 8
    assert batch.divide(0, size).pair_mask.sum() == 8
