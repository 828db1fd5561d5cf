"""Synthetic data for --mock-data, which a model can learn."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from megatron.data.bert_dataset import BertDatasetBuilder, BertSamples
from megatron.data.bert_index import SPECIAL_TOKENS
from megatron.data.bert_samples import SampleRules, build_sample
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import GPTDatasetBuilder, GPTSamples
from megatron.errors import InputError


@dataclasses.dataclass(kw_only=True)
class MockGPTDataset(GPTSamples):
    """Synthetic samples that a model can learn: each counts up from a random start by a random step.

    A sample depends only on the seed and its index.
    """

    RANGE: ClassVar[int] = 1000  # ids in use, so the task does not get harder with a larger vocabulary
    MAX_STEP: ClassVar[int] = 4

    samples: int
    seed: tuple[int, ...]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return sample `i`: {"text": int64 [seq_length + 1]}."""
        rng = np.random.default_rng((*self.seed, i))
        ids = min(self.vocab_size, self.RANGE)
        start, step = rng.integers(ids), rng.integers(1, self.MAX_STEP + 1)
        return {"text": (start + step * np.arange(self.config.seq_length + 1)) % ids}


class MockBertDataset(BertSamples):
    """Synthetic samples that a model can learn: each counts up by a random step, in two segments.

    A sample depends only on the seed and its index. Ids 0 to 3 stand for [PAD], [CLS], [SEP] and [MASK].
    """

    SPECIAL_IDS = 4
    RANGE = 1000  # ids of words, so the task does not get harder with a larger vocabulary
    MAX_STEP = 4

    def __init__(
        self,
        samples: int,
        config: DataConfig,
        *,
        vocab_size: int,
        seed: tuple[int, ...],
        length_multiple: int = 8,
    ) -> None:
        if vocab_size <= self.SPECIAL_IDS:
            raise InputError(
                f"--mock-data: needs a vocabulary of more than {self.SPECIAL_IDS} ids, the first of which are special "
                f"tokens; this one has {vocab_size}"
            )
        self.samples = samples
        self.words = min(vocab_size - self.SPECIAL_IDS, self.RANGE)
        rules = SampleRules(
            seq_length=config.seq_length,
            mask_prob=config.mask_prob,
            binary_head=config.bert_binary_head,
            vocab_size=self.SPECIAL_IDS + self.words,
            pad=0,
            cls=1,
            sep=2,
            mask=3,
            continues=np.zeros(vocab_size, dtype=bool),
        )
        super().__init__(rules, length_multiple, padding_free=config.padding_free)
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return sample `i`, from `build_sample`, at least half as long as the sequence."""
        rng = np.random.RandomState(np.random.PCG64((*self.seed, i)))
        longest = self.rules.seq_length - SPECIAL_TOKENS
        start, step = rng.randint(self.words), rng.randint(1, self.MAX_STEP + 1)
        length = rng.randint(max(2, longest // 2), longest + 1)
        first = rng.randint(1, length)
        text = self.SPECIAL_IDS + (start + step * np.arange(length)) % self.words
        return build_sample(text, [first, length - first], longest, self.rules, rng)


def mock_gpt(builder: GPTDatasetBuilder, samples: int, split: int) -> MockGPTDataset:
    return MockGPTDataset(
        config=builder.config,
        vocab_size=builder.vocab_size,
        eod=builder.eod,
        samples=samples,
        seed=(builder.seed, split),
    )


def mock_bert(builder: BertDatasetBuilder, samples: int, split: int) -> MockBertDataset:
    return MockBertDataset(
        samples,
        builder.config,
        vocab_size=builder.tokenizer.vocab_size,
        seed=(builder.seed, split),
        length_multiple=builder.length_multiple,
    )
