"""Reads what NVIDIA's own code has written, for tests that compare with it."""

from __future__ import annotations

import argparse
import codecs
from pathlib import Path

import numpy as np
import torch

NAMES = {
    ".attention.": ".self_attention.",
    ".query_key_value.": ".linear_qkv.",
    ".dense.": ".linear_proj.",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "dense_h_to_4h": "linear_fc1",
    "dense_4h_to_h": "linear_fc2",
}


# What a checkpoint of a run holds beside tensors and numbers: the flags, and the state of numpy's generator.
KINDS = [argparse.Namespace, np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype("uint32"))]


def v25_weights(folder: Path, encoder: str = "decoder") -> dict[str, torch.Tensor]:
    """The weights of an unpartitioned checkpoint of Megatron-LM v2.5, by our names."""
    (path,) = folder.glob("*/mp_rank_00/model_optim_rng.pt")
    with torch.serialization.safe_globals([*KINDS, codecs.encode]):
        whole = torch.load(path, weights_only=True)["model"]
    model = whole["language_model"]
    state = {
        f"embedding.{table}.weight": part["weight"] for table, part in model["embedding"].items() if part
    }
    for name, tensor in model["encoder"].items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        state[f"{encoder}.{name}"] = tensor
    parts = {
        "pooler": model.get("pooler"),
        "lm_head": whole.get("lm_head"),
        "binary_head": whole.get("binary_head"),
    }
    for part, tensors in parts.items():
        for name, tensor in (tensors or {}).items():
            name = f"{part}.{name}".replace("lm_head.bias", "output_layer.bias").replace(
                "layernorm", "layer_norm"
            )
            state[name] = tensor
    return state
