"""Keys that a config.json lacks have the defaults of transformers, or are required."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import InputError
from megatron.interop.huggingface.families import FAMILIES
from megatron.interop.huggingface.settings import read_settings
from megatron.model.config import ModelConfig

# Fields without which a family's default config is no model that is supported.
NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}}
KINDS: list[Any] = [(kind, {}) for kind in FAMILIES]
WIDE = {"num_attention_heads": 64, "hidden_size": 4096}  # other than the default of num_key_value_heads
KINDS += [
    pytest.param(kind, WIDE, marks=pytest.mark.slow)
    for kind, family in FAMILIES.items()
    if "num_key_value_heads" in family.settings
]
KINDS += [
    ("qwen2", {"use_sliding_window": True}),
    ("qwen2_moe", {"use_sliding_window": True}),
    ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 3}),
    ("qwen3", {"use_sliding_window": True}),
    ("qwen3_moe", {"use_sliding_window": True}),
]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def config_of(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The complete config.json of transformers for the given keys."""
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("needs transformers 5")
    config = getattr(transformers, FAMILIES[kind].architectures[0]).config_class
    return config(**{key: value for key, value in fields.items() if key != "model_type"}).to_dict()


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return read_settings(path).model


@pytest.mark.parametrize(("kind", "fields"), KINDS)
def test_missing_keys(tmp_path: Path, kind: str, fields: dict) -> None:
    config = config_of(kind, NEEDED.get(kind, {}) | fields)
    config.pop("layer_types", None)  # follows from the other keys
    rest = dict(config)
    for key in config:
        shorter = {other: value for other, value in config.items() if other != key}
        try:
            found = read(tmp_path, shorter)
        except InputError:
            continue  # required
        assert found == read(tmp_path, config_of(kind, shorter)), key
        del rest[key]
    assert read(tmp_path, rest) == read(tmp_path, config_of(kind, rest))
    assert len(rest) < len(config) - 10


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss", "gemma3_text"])
def test_rope_scaling_comes_before_rope_parameters(tmp_path: Path, kind: str) -> None:
    plain = config_of(kind, {})
    scaled = plain | {"rope_scaling": YARN, "rope_theta": 12345.0}
    found = read(tmp_path, scaled)
    assert (found.use_rope_scaling, found.rope_scaling_type, found.rope_scaling_factor) == (True, "yarn", 4.0)
    assert found == read(tmp_path, config_of(kind, scaled))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_null_for_the_key_value_heads(tmp_path: Path, kind: str) -> None:
    """As many as query heads, not the default number."""
    config = config_of(kind, {"num_attention_heads": 8, "hidden_size": 1024})
    assert config_of(kind, config | {"num_key_value_heads": None})["num_key_value_heads"] == 8
    assert not read(tmp_path, config | {"num_key_value_heads": None}).group_query_attention
