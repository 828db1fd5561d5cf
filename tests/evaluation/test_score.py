"""Scores of continuations, against the logits of each text alone."""

from __future__ import annotations

import random

import pytest
import torch
from models import flat

from megatron.evaluation.score import Score, score, windows
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel

LENGTH, IDS, PREFIX = 12, 30, 29


@pytest.fixture(scope="module", params=["learned_absolute", "rope"])
def model(request: pytest.FixtureRequest) -> GPTModel:
    config = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        init_method_std=0.3,
        position_embedding_type=request.param,
    )
    model = GPTModel(config, ModelContext(vocab_size=IDS, padded_vocab_size=64))
    flat(model).initialize(1)
    return model


@torch.no_grad()
def reference_score(model: GPTModel, context: list[int], continuation: list[int]) -> Score:
    """Score by the chain rule, with one forward pass for each token of the continuation."""
    logprob, is_greedy = 0.0, True
    for i, token in enumerate(continuation):
        # All tokens are predicted in the window of the last one.
        begin = max(0, len(context) + len(continuation) - 1 - LENGTH)
        seen = [*context, *continuation[:i]][begin:]
        logits = model(torch.tensor([seen]), torch.arange(len(seen)).unsqueeze(0))[0, -1, :IDS].double()
        logprob += float(logits[token] - logits.logsumexp(0))
        is_greedy &= int(logits.argmax()) == token
    return Score(logprob, is_greedy)


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_pairs_of_different_lengths(model: GPTModel, batch_size: int) -> None:
    rng = random.Random(0)
    draw = lambda most: rng.choices(range(IDS), k=rng.randint(1, most))  # noqa: E731
    pairs = [(draw(20), draw(LENGTH)) for _ in range(20)]
    # Continuations of one token, and a text that is split in two ways.
    pairs += [([1, 2, 3], [token]) for token in range(IDS)] + [([1, 2], [3, 4]), ([1], [2, 3, 5])]
    done: list[int] = []
    found = score(model, pairs, batch_size=batch_size, advance=done.append)
    expected = [reference_score(model, *pair) for pair in pairs]
    assert [s.logprob for s in found] == pytest.approx([s.logprob for s in expected], rel=1e-5)
    assert [s.is_greedy for s in found] == [s.is_greedy for s in expected]
    assert sum(s.is_greedy for s in found[20:50]) == 1
    assert sum(done) == len(pairs)
    # Pairs with the same input are computed once: 20 texts and [1, 2, 3].
    assert len(done) == -(-21 // batch_size)


def test_longest_texts_come_first(model: GPTModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda *a, **k: shapes.append(a[1].shape) or forward(*a, **k))
    score(model, [([1] * n, [2]) for n in (3, 9, 1, 30, 5)], batch_size=2, advance=lambda n: None)
    assert [tuple(shape) for shape in shapes] == [(2, LENGTH), (2, 5), (1, 1)]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 17, 23, 24])
def test_windows_hold_each_token_once(count: int) -> None:
    tokens, length = list(range(count)), 8
    pairs = list(windows(tokens, PREFIX, length))
    assert [token for _, continuation in pairs for token in continuation] == tokens
    stream = [PREFIX, *tokens]
    for i, (context, continuation) in enumerate(pairs):
        # A slice of the text: one context length plus the predicted token, or all that there is.
        assert len(context) + len(continuation) == min(count, length) + 1
        begin = stream.index(context[0])
        assert stream[begin : begin + len(context) + len(continuation)] == context + continuation
        assert len(context) == 1 or i == len(pairs) - 1


def test_windows_equal_lm_eval() -> None:
    """Example from the documentation of lm_eval's `LM.loglikelihood_rolling`."""
    assert list(windows(list(range(10)), PREFIX, 4)) == [
        ([PREFIX], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]
