"""Sampled tokens, against the requested distributions."""

from __future__ import annotations

import pytest
import torch

from megatron.errors import InputError
from megatron.inference.sampling import Sampler, SamplingConfig, sample_tokens


def frequencies(config: SamplingConfig, logits: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    samplers = [Sampler(config, [0], generator)] * 50
    draws = [token for _ in range(80) for token in sample_tokens(logits.expand(50, -1), samplers)]
    return torch.bincount(torch.tensor(draws), minlength=len(logits)) / len(draws)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 2}, [0, 0.4 / 0.7, 0, 0.3 / 0.7]),
        ({"top_p": 0.6}, [0, 0.4 / 0.7, 0, 0.3 / 0.7]),
        ({"top_p": 0.01}, [0, 1, 0, 0]),
        ({"top_p": 1.0}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 99}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 3, "top_p": 0.7}, [0, 0.4 / 0.7, 0, 0.3 / 0.7]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"temperature": 1e-6}, [0, 1, 0, 0]),
        ({"top_p": 1e-60}, [0, 1, 0, 0]),
        ({"repetition_penalty": 1e6}, [0, 0.4 / 0.9, 0.2 / 0.9, 0.3 / 0.9]),
        ({"repetition_penalty": 1e-6}, [1 / 1.9, 0.4 / 1.9, 0.2 / 1.9, 0.3 / 1.9]),
        ({"greedy": True}, [0, 1, 0, 0]),
    ],
)
def test_distributions(fields: dict, expected: list[float]) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    found = frequencies(SamplingConfig(**fields), logits)
    assert found.tolist() == pytest.approx(expected, abs=0.03)
    assert all(f == 0 for f, e in zip(found.tolist(), expected, strict=True) if e == 0)


def test_top_p_with_equally_probable_tokens() -> None:
    found = frequencies(SamplingConfig(top_p=0.32), torch.zeros(20))
    assert found.nonzero().flatten().tolist() == list(range(7))


def test_rows_of_a_batch_have_separate_settings() -> None:
    """Each row of a batch gets the same token as alone."""
    kinds = [
        {},
        {"greedy": True},
        {"top_k": 5},
        {"top_p": 0.5, "temperature": 0.7},
        {"repetition_penalty": 1.5, "top_k": 3, "top_p": 0.9},
    ]
    logits = torch.randn(len(kinds), 50, generator=torch.Generator().manual_seed(3)) * 3

    def make(i: int) -> Sampler:
        return Sampler(SamplingConfig(**kinds[i]), [1, 2, 3], torch.Generator().manual_seed(i))

    batched = sample_tokens(logits, [make(i) for i in range(len(kinds))])
    assert batched == [sample_tokens(logits[i : i + 1], [make(i)])[0] for i in range(len(kinds))]


def test_repetition_penalty() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    config = SamplingConfig(greedy=True, repetition_penalty=1.2)
    assert sample_tokens(logits, [Sampler(config, [0, 0], torch.Generator())]) == [1]
    assert sample_tokens(logits, [Sampler(config, [2], torch.Generator())]) == [0]
    assert logits.tolist() == [[2.0, pytest.approx(1.9), -1.0]]


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"temperature": 0.0}, "--temperature"),
        ({"temperature": 1e-40}, "--temperature"),
        ({"temperature": -1.0}, "--temperature"),
        ({"top_p": 1.5}, "--top-p"),
        ({"top_k": -1}, "--top-k"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty"),
        ({"repetition_penalty": 1e300}, "--repetition-penalty"),
        ({"out_seq_length": 0}, "--out-seq-length"),
    ],
)
def test_invalid_settings(fields: dict, flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        SamplingConfig(**fields)
