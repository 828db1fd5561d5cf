"""Checkpoints of Megatron-LM's HybridModel whose layers are attention and MLP in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia import assert_equal, checkpoint_of, weights
from torch import Tensor
from torch_dist import DISTRIBUTED, LLAMA, TOKENIZER, common_state, write

from megatron.checkpoint.checkpoint import model_config
from megatron.errors import InputError
from megatron.interop.nvidia.read import open_megatron
from megatron.model.config import ModelConfig

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# The parts of a GPT's layer in each layer of a HybridModel, and the names of its norms.
ATTENTION = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "self_attention.": "self_attention.",
}
MLP = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_", "mlp.": "mlp."}


def hybrid_name(name: str) -> str:
    """The name in a HybridModel of a GPT's tensor."""
    if name.startswith("decoder.final_layernorm."):
        return name.replace("final_layernorm", "final_norm")
    if not name.startswith("decoder.layers."):
        return name
    _, _, layer, part = name.split(".", 3)
    for offset, names in enumerate((ATTENTION, MLP)):
        for ours, theirs in names.items():
            if part.startswith(ours):
                return f"decoder.layers.{2 * int(layer) + offset}.{theirs}{part.removeprefix(ours)}"
    raise AssertionError(name)


def write_hybrid(
    tmp_path: Path, fields: dict[str, Any], flags: dict[str, Any]
) -> tuple[Path, dict[str, Tensor]]:
    """Write weights and first moments, 2 times the weights; return the folder and the weights."""
    checkpoint = checkpoint_of(tmp_path, **fields)
    model = weights(checkpoint)
    tensors = {hybrid_name(name): x for name, x in model.items()}
    tensors |= {f"optimizer.state.exp_avg.{name}": 2 * x for name, x in tensors.items()}
    common = common_state(checkpoint, DISTRIBUTED)
    vars(common["args"]).update({"num_layers": 8} | flags)
    return write(tmp_path / "run" / "iter_0000012", tensors, common), model


@pytest.mark.parametrize("fields", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    "flags",
    [
        {
            "hybrid_layer_pattern": "*-*-|*-*-",
            "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
        },
        {
            "hybrid_override_pattern": "*-*-*-*-",
            "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
        },
    ],
    ids=["today", "older"],
)
def test_alternating_layers_are_a_gpt(tmp_path: Path, flags: dict[str, Any], fields: dict[str, Any]) -> None:
    folder, model = write_hybrid(tmp_path, fields, flags)
    found = open_megatron(folder, TOKENIZER)
    assert_equal(weights(found), model)
    assert_equal(weights(found, "optimizer"), {f"exp_avg/{name}": 2 * x for name, x in model.items()})
    expected = vars(model_config(checkpoint_of(tmp_path, **fields))) | {"mask_padded_vocab": False}
    assert model_config(found) == ModelConfig(**expected)
    assert found.iteration == 12 and not found.notes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"hybrid_layer_pattern": "M*M-*-*-"},
            "--hybrid-layer-pattern 'M.*', which has Mamba \\(M\\); only a",
        ),
        (
            {"hybrid_override_pattern": "*EGE*-*-"},
            "--hybrid-override-pattern '.*', which has mixture of experts \\(E\\), gated delta net \\(G\\); only",
        ),
        ({"hybrid_layer_pattern": "*-*-*-*-/*-"}, "which has multi-token prediction \\(/\\); only"),
        ({"hybrid_layer_pattern": "-*-*-*-*"}, "'-\\*-\\*-\\*-\\*', which does not alternate"),
        ({"hybrid_layer_pattern": "*-*-*--*"}, "which does not alternate"),
        ({"hybrid_layer_pattern": "*-*-*-*"}, "which does not alternate"),
        ({"hybrid_layer_pattern": "|"}, "which does not alternate"),
        ({"hybrid_layer_pattern": "*-*-"}, "num_layers is 2 in its flags, but 4 by its tensors"),
        ({"hybrid_layer_pattern": 7}, "its flag hybrid_layer_pattern is 7, which is impossible"),
        ({}, "common\\.pt: holds a HybridModel, but lacks its flag --hybrid-layer-pattern"),
        (
            {"hybrid_layer_pattern": "*-*-*-*-", "spec": ["mine", "stack"]},
            "was trained with --spec, which is not supported",
        ),
        (
            {"hybrid_layer_pattern": "*-*-*-*-", "use_rope_scaling": True},
            "was trained with --use-rope-scaling, which is not supported",
        ),
    ],
)
def test_other_patterns_are_refused(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    layers = {"num_layers": 4} if flags.get("hybrid_layer_pattern") == "*-*-" else {}
    folder, _ = write_hybrid(tmp_path, {}, flags | layers)
    with pytest.raises(InputError, match=message) as caught:
        open_megatron(folder, TOKENIZER)
    assert "\n" not in str(caught.value)


def test_two_tensors_for_a_name(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path)
    tensors = {hybrid_name(name): x for name, x in weights(checkpoint).items()}
    tensors["decoder.layers.0.mlp.linear_fc1.bias"] = torch.ones(128)
    common = common_state(checkpoint, DISTRIBUTED)
    vars(common["args"]).update(num_layers=8, hybrid_layer_pattern="*-*-*-*-")
    folder = write(tmp_path / "run" / "iter_0000012", tensors, common)
    with pytest.raises(
        InputError, match=r"holds two tensors for each of 1 tensor\(s\): decoder\.layers\.0\.mlp"
    ):
        open_megatron(folder, TOKENIZER)
