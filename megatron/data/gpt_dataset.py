"""GPT samples: stretches of token text, and the fields a model is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron.data.config import DataConfig
from megatron.data.index_cache import MappedArrays
from megatron.data.indexed import IndexedDataset
from megatron.flags import InputError


def ltor_fields(text: np.ndarray, eod: int | None, config: DataConfig) -> dict[str, np.ndarray]:
    """What a left-to-right model is trained on, from samples of text.

    An end-of-document token belongs to the document that it ends.

    Args:
        text: int64 [batch, seq + 1].
        eod: id of the end-of-document token; may be None where no flag of `config` needs it.
        config: for --reset-position-ids, --reset-attention-mask and --eod-mask-loss.

    Returns:
        tokens: int64 [batch, seq].
        labels: int64 [batch, seq], the token after each.
        loss_mask: float32 [batch, seq], 1 where the prediction counts; with --eod-mask-loss 0 where it is made
            from an end-of-document token.
        position_ids: int64 [batch, seq]; with --reset-position-ids each document starts at 0.
        document_ids: int64 [batch, seq], only with --reset-attention-mask: documents ended before each token.
            A token may attend to those of its own document, up to itself.
    """
    tokens, labels = np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])
    positions = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    ends = np.zeros(tokens.shape, dtype=bool) if eod is None else tokens == eod
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]

    fields = {"tokens": tokens, "labels": labels}
    fields["loss_mask"] = np.ones(tokens.shape, dtype=np.float32)
    if config.eod_mask_loss:
        fields["loss_mask"][ends] = 0.0
    if config.reset_position_ids:
        positions = positions - np.maximum.accumulate(np.where(starts, positions, 0), axis=1)
    fields["position_ids"] = positions
    if config.reset_attention_mask:
        fields["document_ids"] = np.cumsum(starts, axis=1)
    return fields


class GPTSamples:
    """How samples of GPT become a batch: what the loader asks of a data set."""

    @staticmethod
    def stack(samples: Sequence[dict[str, np.ndarray]], seq_length: int) -> np.ndarray:
        """In a worker: their text, int64 [samples, seq + 1]."""
        text = np.empty((len(samples), seq_length + 1), dtype=np.int64)
        for row, sample in zip(text, samples, strict=True):
            row[:] = sample["text"]
        return text

    # In the training process: to pass five tensors from one process to another takes several times as long as to
    # compute them (8 x 1,024 tokens: 1.2 ms against 0.1 ms).
    fields = staticmethod(ltor_fields)


class GPTDataset(GPTSamples):
    """Samples of seq_length + 1 tokens, in the order of an index of `megatron.data.gpt_index`.

    Pickles as paths, so that a worker process maps the files anew.
    """

    def __init__(self, tokens: IndexedDataset, index: MappedArrays, vocab_size: int) -> None:
        self.tokens = tokens
        self.index = index
        self.vocab_size = vocab_size
        self._documents, self._starts, self._order = index

    def __len__(self) -> int:
        return len(self._order)

    def __reduce__(self) -> tuple[type[GPTDataset], tuple[IndexedDataset, MappedArrays, int]]:
        return GPTDataset, (self.tokens, self.index, self.vocab_size)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Sample `i`: {"text": int64 [seq_length + 1]}.

        Raises:
            InputError: a token id is not in the vocabulary.
        """
        text = np.concatenate([self.tokens.get(*span) for span in self._spans(i)]).astype(np.int64)
        if text.min() < 0 or text.max() >= self.vocab_size:
            raise InputError(self._foreign_token(i))
        return {"text": text}

    def _spans(self, i: int) -> Iterator[tuple[int, int, int]]:
        """Sequence, offset and length of each piece of sample `i`."""
        start = int(self._order[i])
        (first, offset), (last, end) = self._starts[start : start + 2].tolist()
        for position in range(first, last + 1):
            sequence = int(self._documents[position])
            stop = end + 1 if position == last else int(self.tokens.sizes[sequence])
            yield sequence, offset, stop - offset
            offset = 0

    def _foreign_token(self, i: int) -> str:
        for sequence, offset, length in self._spans(i):
            piece = self.tokens.get(sequence, offset, length).astype(np.int64)
            foreign = (piece < 0) | (piece >= self.vocab_size)
            if foreign.any():
                at = int(np.argmax(foreign))
                return (
                    f"{self.tokens.bin_path}: token {offset + at} of document {sequence} (in sample {i}) is id "
                    f"{piece[at]}, but the vocabulary has {self.vocab_size} ids; the file was made with another "
                    "tokenizer, or is damaged"
                )
        raise AssertionError(f"sample {i} holds no foreign token")


class MockDataset(GPTSamples):
    """Synthetic samples that a model can learn: each counts up, from a start and by a step of its own.

    A sample depends on the seed and its index alone.
    """

    RANGE = 1000  # ids in use, so that what there is to learn does not grow with the vocabulary
    MAX_STEP = 4

    def __init__(self, samples: int, *, seq_length: int, vocab_size: int, seed: tuple[int, ...]) -> None:
        self.samples = samples
        self.seq_length = seq_length
        self.range = min(vocab_size, self.RANGE)
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Sample `i`: {"text": int64 [seq_length + 1]}."""
        rng = np.random.default_rng((*self.seed, i))
        start, step = rng.integers(self.range), rng.integers(1, self.MAX_STEP + 1)
        return {"text": (start + step * np.arange(self.seq_length + 1)) % self.range}
