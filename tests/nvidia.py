"""Reads what NVIDIA's own code has written, for tests that compare with it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

NAMES = {
    ".attention.": ".self_attention.",
    ".query_key_value.": ".linear_qkv.",
    ".dense.": ".linear_proj.",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "dense_h_to_4h": "linear_fc1",
    "dense_4h_to_h": "linear_fc2",
}


def v25_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The GPT weights of an unpartitioned checkpoint of Megatron-LM v2.5, by our names."""
    path = folder / "release" / "mp_rank_00" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        model = torch.load(path, weights_only=True)["model"]["language_model"]
    state = {
        f"embedding.{table}.weight": part["weight"] for table, part in model["embedding"].items() if part
    }
    for name, tensor in model["encoder"].items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        state[f"decoder.{name}"] = tensor
    return state
