"""The registry of the model's variants."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.errors import InputError
from megatron.interop.external import meta_model
from megatron.model.config import VARIANT_FLAGS, VARIANT_VALUES, ModelConfig
from megatron.model.variants import VARIANTS

SIZES = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 8}


def test_every_variant_is_registered() -> None:
    assert sorted(VARIANTS) == sorted([*VARIANT_VALUES, *VARIANT_FLAGS])
    assert ModelConfig(**SIZES).variants == []


@pytest.mark.slow  # imports in processes of their own
@pytest.mark.parametrize(
    "module", ["megatron.plugins", "megatron.interop.external", "megatron.inference.load"]
)
def test_what_builds_models_fills_the_registry(module: str) -> None:
    code = f"import {module}; from megatron.model.variants import VARIANTS; assert VARIANTS"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flags_that_replace_the_same_part_exclude_each_other() -> None:
    config = ModelConfig(**SIZES, use_parallel_residual=True, apply_residual_connection_post_layernorm=True)
    with pytest.raises(
        InputError,
        match="--apply-residual-connection-post-layernorm and --use-parallel-residual exclude each other",
    ):
        meta_model("GPT", config, 10)
