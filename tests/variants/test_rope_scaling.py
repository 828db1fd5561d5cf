"""Turns of scaled RoPE frequencies at their limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.plugins import prepared
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.variants.rope_scaling import Scaling


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_equal_turns_are_a_step(kind: str) -> None:
    """Frequencies of few turns are divided, the others kept; none is interpolated."""
    base, length, channels = 10000.0, 2048, 16
    frequencies = base ** -(torch.arange(channels, dtype=torch.float32) / channels)
    scaled = Scaling(kind, 8.0, length, (4.0, 4.0)).scaled(frequencies, base)
    kept = frequencies * length / (2 * math.pi) > 4
    assert kept[0] and not kept[-1]
    # YaRN rounds the limits to channels, so that one between them is interpolated.
    clear = torch.ones(channels, dtype=torch.bool)
    if kind == "yarn":
        clear[kept.sum() - 1 : kept.sum() + 1] = False
    expected = torch.where(kept, frequencies, frequencies / 8)
    torch.testing.assert_close(scaled[clear], expected[clear])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"rope_scaling_turns": (1.0, 4.0)},
            "--rope-scaling-turns has no meaning with --rope-scaling-type linear",
        ),
        (
            {"rope_scaling_attention_factor": 1.5},
            "--rope-scaling-attention-factor: 1.5 needs --rope-scaling-type yarn",
        ),
    ],
)
def test_linear_scaling_has_only_a_factor(flags: dict[str, Any], message: str) -> None:
    config = ModelConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=8,
        position_embedding_type="rope",
        use_rope_scaling=True,
        rope_scaling_type="linear",
        **flags,
    )
    with pytest.raises(InputError, match=message):
        Scaling.from_config(config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("llama3 --rope-scaling-attention-factor 1.2", "--rope-scaling-attention-factor: 1.2 needs"),
        ("linear --rope-scaling-turns 1 4", "--rope-scaling-turns has no meaning with"),
        ("yarn --rope-scaling-turns 4 1", "--rope-scaling-turns: 4.0 1.0: the first is larger"),
        (
            "linear --no-yarn-correction-range-round-to-int",
            "--no-yarn-correction-range-round-to-int needs --rope-scaling-type yarn",
        ),
    ],
)
def test_errors_come_with_the_config(flags: str, message: str) -> None:
    words = f"{RUN} --position-embedding-type rope --use-rope-scaling --rope-scaling-type {flags}".split()
    with pytest.raises(InputError, match=f"^{message}"):
        prepared(parse_run_config(words, description="", defaults=DEFAULTS), GPT)


def test_flags_without_effect_are_refused_as_the_user_wrote_them() -> None:
    with pytest.raises(
        InputError, match=r"^--no-yarn-correction-range-round-to-int needs --use-rope-scaling$"
    ):
        parse_run_config(
            f"{RUN} --no-yarn-correction-range-round-to-int".split(), description="", defaults=DEFAULTS
        )


RUN = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --micro-batch-size 1
    --global-batch-size 1 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 59
"""
