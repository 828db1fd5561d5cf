from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import GPTDataset, ltor_batch
from megatron.data.gpt_index import load_or_build
from megatron.data.index_cache import IndexRequest, MappedArrays
from megatron.data.indexed import IndexedDataset
from megatron.errors import InputError
from megatron.variants.mock_data import MockGPTDataset

EOD = 9


def index_of(
    dataset: IndexedDataset, documents: range, seq_length: int, *, samples: int, seed: int, cache: Path
) -> MappedArrays:
    request = IndexRequest(
        dataset=dataset, documents=documents, split="train", samples=samples, seed=seed, cache=str(cache)
    )
    return load_or_build(request, seq_length)


def megatron_fields(row: list[int], config: DataConfig) -> dict[str, np.ndarray]:
    """Fields of one row, from the mask that Megatron-LM builds token by token."""
    tokens = row[:-1]
    n = len(tokens)
    allowed = np.tril(np.ones((n, n), dtype=bool))
    position_ids, loss_mask = np.arange(n), np.ones(n)
    previous = 0
    for i in range(n):
        if tokens[i] != EOD:
            continue
        if config.eod_mask_loss:
            loss_mask[i] = 0
        if config.reset_attention_mask:
            allowed[i + 1 :, : i + 1] = False
        if config.reset_position_ids:
            position_ids[i + 1 :] -= i + 1 - previous
            previous = i + 1
    return {"loss_mask": loss_mask, "position_ids": position_ids, "allowed": allowed}


@pytest.mark.parametrize("bits", range(8))
def test_fields_equal_megatron(bits: int) -> None:
    config = DataConfig(
        reset_position_ids=bool(bits & 1), reset_attention_mask=bool(bits & 2), eod_mask_loss=bool(bits & 4)
    )
    rng = np.random.RandomState(0)
    text = rng.randint(0, 12, size=(50, 18))
    text[0], text[1, [0, 16, 17]] = EOD, EOD
    batch = ltor_batch(text, EOD, config)
    np.testing.assert_array_equal(batch.tokens, text[:, :-1])
    np.testing.assert_array_equal(batch.labels, text[:, 1:])
    assert batch.loss_mask.dtype == torch.float32
    assert (batch.document_ids is not None) == config.reset_attention_mask
    for i, row in enumerate(text.tolist()):
        expected = megatron_fields(row, config)
        np.testing.assert_array_equal(batch.loss_mask[i], expected["loss_mask"])
        np.testing.assert_array_equal(batch.position_ids[i], expected["position_ids"])
        if config.reset_attention_mask:
            document = batch.document_ids[i].numpy()
            allowed = np.tril(document[:, None] == document[None, :])
            np.testing.assert_array_equal(allowed, expected["allowed"])
    assert all(tensor.is_contiguous() for _, tensor in batch.items())
    assert {tensor.dtype for _, tensor in batch.items()} == {torch.int64, torch.float32}


def test_fields_without_an_end_of_document_token() -> None:
    batch = ltor_batch(np.arange(6).reshape(1, 6), None, DataConfig())
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.loss_mask.all()
    assert {name for name, _ in batch.items()} == {"tokens", "labels", "loss_mask", "position_ids"}


def test_empty_batch() -> None:
    flags = DataConfig(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    for batch in (
        ltor_batch(np.empty((0, 6), np.int64), EOD, flags),
        MockGPTDataset(samples=5, config=DataConfig(seq_length=5), vocab_size=50, seed=(1, 0)).collate([]),
    ):
        assert {tuple(tensor.shape) for _, tensor in batch.items()} == {(0, 5)}


def test_samples_partition_the_stream(corpus, tmp_path) -> None:
    """In stream order, samples join into the concatenated documents; neighbors share one token."""
    index = index_of(corpus, range(3, 40), 7, samples=300, seed=5, cache=tmp_path)
    dataset = GPTDataset(tokens=corpus, index=index, config=DataConfig(), vocab_size=corpus.num_tokens)
    documents, _, order = index
    stream = np.concatenate([corpus.get(i) for i in documents])
    assert len(dataset) == len(order) >= 300
    for i, position in enumerate(order.tolist()):
        text = dataset[i]["text"]
        assert text.dtype == np.int64
        np.testing.assert_array_equal(text, stream[position * 7 : position * 7 + 8])


def test_id_outside_the_vocabulary_is_located(write, tmp_path) -> None:
    data = write([[1, 2, 3, 4], [5, 6], [7, 8, 50, 9]])
    index = index_of(data, range(3), 9, samples=1, seed=1, cache=tmp_path)
    assert GPTDataset(tokens=data, index=index, config=DataConfig(), vocab_size=51)[0]["text"].max() == 50
    with pytest.raises(
        InputError,
        match=r"corpus\.bin: token 2 of document 2 \(in sample 0\) has id 50, but the vocabulary has 50 ids",
    ):
        GPTDataset(tokens=data, index=index, config=DataConfig(), vocab_size=50)[0]
    signed = write([[1, 2, -3, 4]], "signed", dtype=np.int32)
    index = index_of(signed, range(1), 3, samples=1, seed=1, cache=tmp_path)
    with pytest.raises(InputError, match=r"token 2 of document 0 .* has id -3"):
        GPTDataset(tokens=signed, index=index, config=DataConfig(), vocab_size=50)[0]


def test_mock_samples() -> None:
    def dataset(seed: int) -> MockGPTDataset:
        return MockGPTDataset(samples=100, config=DataConfig(seq_length=16), vocab_size=50, seed=(seed, 0))

    texts = [dataset(1)[i]["text"] for i in range(100)]
    for i, text in enumerate(texts):
        assert text.shape == (17,)
        assert text.dtype == np.int64
        assert 0 <= text.min() <= text.max() < 50
        np.testing.assert_array_equal(text, dataset(1)[i]["text"])
        assert len(set(np.diff(text) % 50)) == 1
    assert len({text.tobytes() for text in texts}) > 50
    assert any((dataset(2)[i]["text"] != texts[i]).any() for i in range(100))
