from __future__ import annotations

import numpy as np
import pytest

from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import GPTDataset, MockDataset, ltor_fields
from megatron.data.gpt_index import load_or_build
from megatron.flags import InputError

EOD = 9


def megatron_fields(row: list[int], config: DataConfig) -> dict[str, np.ndarray]:
    """One row's fields by way of the mask that Megatron-LM writes token by token, document by document."""
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
def test_fields_as_megatron_makes_them(bits: int) -> None:
    config = DataConfig(
        reset_position_ids=bool(bits & 1), reset_attention_mask=bool(bits & 2), eod_mask_loss=bool(bits & 4)
    )
    rng = np.random.RandomState(0)
    text = rng.randint(0, 12, size=(50, 18))
    text[0], text[1, [0, 16, 17]] = EOD, EOD
    fields = ltor_fields(text, EOD, config)
    np.testing.assert_array_equal(fields["tokens"], text[:, :-1])
    np.testing.assert_array_equal(fields["labels"], text[:, 1:])
    assert fields["loss_mask"].dtype == np.float32
    assert ("document_ids" in fields) == config.reset_attention_mask
    for i, row in enumerate(text.tolist()):
        expected = megatron_fields(row, config)
        np.testing.assert_array_equal(fields["loss_mask"][i], expected["loss_mask"])
        np.testing.assert_array_equal(fields["position_ids"][i], expected["position_ids"])
        if config.reset_attention_mask:
            document = fields["document_ids"][i]
            allowed = np.tril(document[:, None] == document[None, :])
            np.testing.assert_array_equal(allowed, expected["allowed"])
    assert all(values.flags.c_contiguous for values in fields.values())


def test_fields_without_an_end_of_document_token() -> None:
    fields = ltor_fields(np.arange(6).reshape(1, 6), None, DataConfig())
    assert fields["position_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert fields["loss_mask"].all()
    assert set(fields) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert ltor_fields(np.empty((0, 6), np.int64), None, DataConfig())["tokens"].shape == (0, 5)


def test_samples_are_the_stream_cut_in_pieces(corpus, tmp_path) -> None:
    """In stream order, samples join into the documents, one after the other, sharing a token at each seam."""
    index = load_or_build(
        corpus, range(3, 40), name="train", seq_length=7, samples=300, seed=5, cache=str(tmp_path)
    )
    dataset = GPTDataset(corpus, index, vocab_size=corpus.num_tokens)
    documents, _, order = index
    stream = np.concatenate([corpus.get(i) for i in documents])
    assert len(dataset) == len(order) >= 300
    for i, place in enumerate(order.tolist()):
        text = dataset[i]["text"]
        assert text.dtype == np.int64
        np.testing.assert_array_equal(text, stream[place * 7 : place * 7 + 8])


def test_an_id_outside_the_vocabulary_is_located(write, tmp_path) -> None:
    data = write([[1, 2, 3, 4], [5, 6], [7, 8, 50, 9]])
    index = load_or_build(data, range(3), name="train", seq_length=9, samples=1, seed=1, cache=str(tmp_path))
    assert GPTDataset(data, index, vocab_size=51)[0]["text"].max() == 50
    with pytest.raises(
        InputError,
        match=r"corpus\.bin: token 2 of document 2 \(in sample 0\) is id 50, but the vocabulary has 50 ids",
    ):
        GPTDataset(data, index, vocab_size=50)[0]
    signed = write([[1, 2, -3, 4]], "signed", dtype=np.int32)
    index = load_or_build(
        signed, range(1), name="train", seq_length=3, samples=1, seed=1, cache=str(tmp_path)
    )
    with pytest.raises(InputError, match=r"token 2 of document 0 .* is id -3"):
        GPTDataset(signed, index, vocab_size=50)[0]


def test_mock_samples() -> None:
    def dataset(seed: int) -> MockDataset:
        return MockDataset(100, seq_length=16, vocab_size=50, seed=(seed, 0))

    texts = [dataset(1)[i]["text"] for i in range(100)]
    for i, text in enumerate(texts):
        assert text.shape == (17,)
        assert text.dtype == np.int64
        assert 0 <= text.min() <= text.max() < 50
        np.testing.assert_array_equal(text, dataset(1)[i]["text"])
        assert len(set(np.diff(text) % 50)) == 1
    assert len({text.tobytes() for text in texts}) > 50
    assert any((dataset(2)[i]["text"] != texts[i]).any() for i in range(100))
