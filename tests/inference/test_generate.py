"""Sampling, against transformers and against the distributions asked for."""

from __future__ import annotations

import pytest
import torch
from models import flat

from megatron.flags import InputError
from megatron.inference.generate import SamplingConfig, choose, generate, generate_batch, generate_texts
from megatron.model.config import ModelConfig
from megatron.model.gpt import GPTModel
from megatron.tokenizer.null import NullTokenizer


def make(**fields) -> GPTModel:
    config = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=24,
        init_method_std=0.3,
        **fields,
    )
    model = GPTModel(config, vocab_size=50, padded_vocab_size=64)
    flat(model).initialize(1)
    return model


@pytest.mark.parametrize("position", ["learned_absolute", "rope"])
def test_greedy_is_the_argmax_of_the_whole_context(position: str) -> None:
    """The cache changes nothing: each token is the most probable one given all before it, computed afresh."""
    model = make(position_embedding_type=position)
    tokens = [3, 1, 4, 1, 5]
    produced = list(generate(model, tokens, SamplingConfig(greedy=True, out_seq_length=12), eod=None))
    assert len(produced) == 12
    with torch.no_grad():
        for token in produced:
            ids = torch.tensor([tokens])
            logits = model(ids, torch.arange(len(tokens)).unsqueeze(0))
            assert token == int(logits[0, -1].argmax())
            tokens = [*tokens, token]


def test_ends_at_eod_and_at_the_end_of_the_context() -> None:
    model = make()
    greedy = SamplingConfig(greedy=True, out_seq_length=100)
    whole = list(generate(model, [1, 2, 3], greedy, eod=None))
    assert len(whole) == 21
    eod = whole[4]
    assert list(generate(model, [1, 2, 3], greedy, eod=eod)) == whole[: whole.index(eod)]


def test_seeds() -> None:
    model = make()
    draw = lambda seed: list(generate(model, [1], SamplingConfig(seed=seed), eod=None))  # noqa: E731
    assert draw(1) == draw(1) != draw(2)
    assert max(max(draw(seed)) for seed in range(5)) < 50  # never a row that pads the vocabulary


def frequencies(config: SamplingConfig, logits: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([choose(logits, config, generator) for _ in range(4000)])
    return torch.bincount(draws, minlength=len(logits)) / len(draws)


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
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"greedy": True}, [0, 1, 0, 0]),
    ],
)
def test_distributions(fields: dict, expected: list[float]) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    found = frequencies(SamplingConfig(**fields), logits)
    assert found.tolist() == pytest.approx(expected, abs=0.03)
    assert all(f == 0 for f, e in zip(found.tolist(), expected, strict=True) if e == 0)


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"temperature": 0.0}, "--temperature"),
        ({"temperature": -1.0}, "--temperature"),
        ({"top_p": 1.5}, "--top-p"),
        ({"top_k": -1}, "--top-k"),
        ({"out_seq_length": 0}, "--out-seq-length"),
    ],
)
def test_wrong_settings_are_refused(fields: dict, flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        SamplingConfig(**fields)


@pytest.mark.parametrize("prompt", [[], [1] * 24])
def test_wrong_prompts_are_refused(prompt: list[int]) -> None:
    with pytest.raises(InputError, match="--prompt"):
        list(generate(make(), prompt, SamplingConfig(), eod=None))


PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7], [1] * 23]


@pytest.mark.parametrize("position", ["learned_absolute", "rope"])
@pytest.mark.parametrize("fields", [{"greedy": True}, {"temperature": 0.7, "top_k": 20}])
def test_prompts_of_a_batch_grow_as_each_alone(position: str, fields: dict) -> None:
    """Up to the end of the context, an end of document, or what `is_complete` waits for."""
    model = make(position_embedding_type=position)
    config = SamplingConfig(out_seq_length=18, **fields)
    seeds = [11, 12, 13, 14, 15]
    alone = [
        list(generate(model, prompt, SamplingConfig(out_seq_length=18, seed=seed, **fields), eod=None))
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    assert [len(tokens) for tokens in alone] == [18, 18, 17, 18, 1]
    eod, last = alone[0][5], alone[3][7]

    def cut(tokens: list[int]) -> list[int]:
        tokens = tokens[: tokens.index(eod)] if eod in tokens else tokens
        return tokens[: tokens.index(last) + 1] if last in tokens else tokens

    together = [[] for _ in PROMPTS]
    for i, token in generate_batch(
        model, PROMPTS, config, eod, seeds=seeds, is_complete=lambda tokens: tokens[-1] == last
    ):
        together[i].append(token)
    assert together == [cut(tokens) for tokens in alone]
    assert len(together[0]) <= 5 and len(together[3]) <= 8


def test_texts_end_before_what_they_stop_at() -> None:
    model, tokenizer = make(), NullTokenizer(49)
    greedy = SamplingConfig(greedy=True, out_seq_length=6)
    ids = [list(generate(model, prompt[-18:], greedy, eod=49)) for prompt in PROMPTS]
    stop = f" {ids[0][3]} "
    expected = [" ".join(map(str, tokens)).split(stop)[0] for tokens in ids]
    assert expected[0] != " ".join(map(str, ids[0]))
    for batch_size in (1, 2, 9):
        done: list[int] = []
        texts = generate_texts(
            model,
            tokenizer,
            PROMPTS,
            greedy,
            until=["never", stop],
            batch_size=batch_size,
            advance=done.append,
        )
        assert texts == expected and sum(done) == len(PROMPTS)
