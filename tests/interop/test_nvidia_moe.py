"""Mixtures of experts in checkpoints of current Megatron-LM, saved with torch.distributed.checkpoint."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia import VOCAB, assert_equal, checkpoint_of, weights
from safetensors.torch import load_file
from torch import Tensor
from torch_dist import DISTRIBUTED, LLAMA, TOKENIZER, common_state, in_stacks, save, write

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.checkpoint.find import find_checkpoint
from megatron.errors import InputError
from megatron.inference.conversion import largest_difference
from megatron.inference.load import load_weights
from megatron.interop.convert import write_native
from megatron.interop.external import meta_model
from megatron.interop.nvidia.read import open_megatron
from megatron.interop.nvidia.write import write_megatron
from megatron.model.config import ModelConfig
from megatron.parallel.slices import GlobalSlice
from megatron.tokenizer.config import TokenizerConfig

# torch warns that there is only one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EXPERTS = 6
MOE = LLAMA | {
    "num_experts": EXPERTS,
    "ffn_hidden_size": 48,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 3,
    "moe_router_group_topk": 3,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (1e-3,),
}
# With the flags of GPT in place of those of Llama, and experts without a gate.
PLAIN = {
    "num_experts": EXPERTS,
    "add_bias_linear": False,
    "moe_router_pre_softmax": True,
    "moe_router_topk": 1,
}
VECTORS = Path(__file__).with_name("nvidia_moe")
# Flags that the files in `VECTORS` lack, and their layers with experts.
FILES = {
    "num_attention_heads": 2,
    "position_embedding_type": "rope",
    "max_position_embeddings": 16,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
LAYERS = {"stacked": "1", "single": "[0]*1+[1]*1"}
DENSE_FIRST = {"moe_layer_freq": "[0]*2+[1]*2"}


def as_saved(tensors: dict[str, Tensor], config: ModelConfig, form: str) -> dict[str, Any]:
    """The tensors as Megatron-LM saves them: "stacked" for all layers, or "by layer", or "single" for each expert."""
    found: dict[str, Any] = {}
    halves = 2 if config.gated else 1
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+\.mlp\.experts)\.weight([12])", name)
        if match is None:
            found[name] = tensor
            continue
        prefix, number = match.groups()
        by_expert = tensor.view(EXPERTS, -1, tensor.shape[1])
        by_expert = by_expert if number == "1" else by_expert.mT.contiguous()
        if form != "single":
            found[f"{prefix}.experts.linear_fc{number}.weight"] = by_expert
            continue
        for expert, matrix in enumerate(by_expert):
            single = f"{prefix}.experts.{expert}.linear_fc{number}.weight"
            if number == "1" and halves == 2:
                gate, up = matrix.chunk(2)
                found |= {f"{single}_w": gate.contiguous(), f"{single}_v": up.contiguous()}
            else:
                found[single] = matrix.contiguous()
    return in_stacks(found, fused=False) if form == "stacked" else found


@pytest.mark.parametrize("saved", ["stacked", "single"])
def test_files_of_nvidia(saved: str) -> None:
    """Checkpoints that Megatron-LM wrote have the logits that it computed."""
    found = open_megatron(VECTORS / saved, TokenizerConfig(vocab_size=64), FILES)
    model = meta_model("GPT", model_config(found), 64)
    load_weights(found, model, torch.float32)
    expected = load_file(VECTORS / f"{saved}.safetensors")
    with torch.no_grad():
        logits = model(expected["tokens"], torch.arange(16).expand(2, 16))
    assert largest_difference([expected["logits"]], [logits]) < 1e-6
    assert model_config(found).moe_layer_freq == LAYERS[saved]


def flags_of(config: ModelConfig) -> dict[str, Any]:
    """The flags of a run as Megatron-LM saves them."""
    flags = vars(config) | {
        "num_query_groups": 1,
        "orig_vocab_size": VOCAB,
        "make_vocab_size_divisible_by": 4,
    }
    freq = [int(bit) for bit in config.expert_layers(config.num_layers)]
    return flags | {
        "moe_layer_freq": 1 if all(freq) else freq,
        "moe_router_load_balancing_type": list(config.moe_router_load_balancing_type),
        "moe_aux_loss_coeff": list(config.moe_aux_loss_coeff),
        "moe_token_dispatcher_type": "flex",  # without effect on the model
    }


@pytest.mark.parametrize("form", ["stacked", "by layer", "single"])
@pytest.mark.parametrize("fields", [MOE, PLAIN, MOE | DENSE_FIRST], ids=["all", "plain", "dense first"])
def test_experts(tmp_path: Path, form: str, fields: dict[str, Any]) -> None:
    if form == "stacked" and "moe_layer_freq" in fields:
        pytest.skip("layers that differ are not stacked")
    checkpoint = checkpoint_of(tmp_path, **fields)
    config, expected = model_config(checkpoint), weights(checkpoint)
    folder = save(tmp_path / "x", as_saved(expected, config, form))
    torch.save({"args": argparse.Namespace(**flags_of(config))}, folder / "common.pt")
    found = open_megatron(folder, TokenizerConfig())
    assert model_config(found) == ModelConfig(**vars(config) | {"mask_padded_vocab": False})
    assert_equal(weights(found), expected)
    name = "decoder.layers.3.mlp.experts.weight2"
    rows = GlobalSlice(tuple(expected[name].shape), 0, ((5, 30), (0, 2)))
    assert (
        found.tensors["model"].read(name, rows).equal(torch.cat([expected[name][5:30], expected[name][:2]]))
    )


@pytest.mark.parametrize(("factor", "noted"), [(1.25, True), (None, False), (-1.0, False)])
def test_a_capacity_is_noted(tmp_path: Path, factor: float | None, noted: bool) -> None:
    checkpoint = checkpoint_of(tmp_path, **PLAIN)
    config = model_config(checkpoint)
    folder = save(tmp_path / "x", as_saved(weights(checkpoint), config, "single"))
    flags = flags_of(config) | {"moe_expert_capacity_factor": factor, "moe_token_drop_policy": "position"}
    torch.save({"args": argparse.Namespace(**flags)}, folder / "common.pt")
    found = open_megatron(folder, TokenizerConfig())
    assert model_config(found).moe_expert_capacity_factor is None
    notes = [
        note for note in found.notes if "--moe-expert-capacity-factor 1.25, which is not converted" in note
    ]
    assert len(notes) == noted


def test_half_precision_and_optimizer(tmp_path: Path) -> None:
    """The experts' biases stay in fp32 and have no optimizer state there; here a run continues with all of it."""
    checkpoint = checkpoint_of(tmp_path, **MOE)
    config, values = model_config(checkpoint), weights(checkpoint)
    is_bias = {name: name.endswith("expert_bias") for name in values}
    saved = {name: x if is_bias[name] else x.bfloat16() for name, x in values.items()}
    states = {
        kind: {name: x * factor for name, x in values.items() if not is_bias[name]}
        for kind, factor in (("exp_avg", 2), ("exp_avg_sq", 3), ("fp32_param", 1))
    }
    tensors = as_saved(saved, config, "stacked")
    for kind, state in states.items():
        in_file = as_saved(state, config, "stacked")
        tensors |= {f"optimizer.state.{kind}.{name}": x for name, x in in_file.items()}
    common = common_state(checkpoint, DISTRIBUTED["optimizer"])
    common["args"].__dict__.update(flags_of(config))
    write(tmp_path / "run" / "iter_0000012", tensors, common)
    found = open_megatron(tmp_path / "run", TOKENIZER)
    assert found.state["config"]["training"]["bf16"]
    write_native(found, tmp_path / "native", lambda size: None)
    native = find_checkpoint(str(tmp_path / "native"), None)
    assert_equal(weights(native), {name: x.float() for name, x in saved.items()})
    optimizer = weights(native, "optimizer")
    for kind, ours in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), ("fp32_param", "master")):
        mine = {
            name.removeprefix(f"{ours}/"): x for name, x in optimizer.items() if name.startswith(f"{ours}/")
        }
        bias = {name: x for name, x in values.items() if is_bias[name] and ours == "master"}
        assert_equal(mine, states[kind] | bias)
    assert sorted(name for name in optimizer if name.startswith("load/")) == sorted(
        f"load/{name}" for name in values if is_bias[name]
    )
    dtypes = {name: tensor["dtype"] for name, tensor in native.tensors["model"].index.items()}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {n for n in values if is_bias[n]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors, flags: flags.update(moe_router_load_balancing_type=["sinkhorn"]),
            "was trained with --moe-router-load-balancing-type 'sinkhorn', which is not supported",
        ),
        (lambda tensors, flags: flags.pop("moe_router_topk"), "--moe-router-topk is required: .* lacks it"),
        (
            lambda tensors, flags: flags.update(moe_ffn_hidden_size=12),
            "moe_ffn_hidden_size is 12 in its flags, but 24 by its tensors",
        ),
        (
            lambda tensors, flags: tensors.pop("decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight_v"),
            r"decoder\.layers\.1\.mlp\.experts\.weight1 lacks an expert or a half of one",
        ),
        (
            lambda tensors, flags: tensors.pop("decoder.layers.1.mlp.experts.experts.2.linear_fc2.weight"),
            r"decoder\.layers\.1\.mlp\.experts\.weight2 lacks an expert or a half of one",
        ),
        (
            lambda tensors, flags: tensors.pop("decoder.layers.1.mlp.router.weight"),
            r"lacks 2 tensor.*decoder\.layers\.1\.mlp\.linear_fc1\.weight",
        ),
    ],
)
def test_damaged_experts(tmp_path: Path, change: Any, message: str) -> None:
    checkpoint = checkpoint_of(tmp_path, **MOE)
    tensors = as_saved(weights(checkpoint), model_config(checkpoint), "single")
    flags = flags_of(model_config(checkpoint))
    change(tensors, flags)
    folder = save(tmp_path / "x", tensors)
    torch.save({"args": argparse.Namespace(**flags)}, folder / "common.pt")
    with pytest.raises(InputError, match=message):
        open_megatron(folder, TokenizerConfig())


def test_v2_5_has_no_experts(tmp_path: Path) -> None:
    checkpoint: Checkpoint = checkpoint_of(tmp_path, **MOE)
    with pytest.raises(
        InputError, match=r"--num-experts: Megatron-LM v2\.5 supports only num_experts None, not 6"
    ):
        write_megatron(checkpoint, tmp_path / "x", lambda size: None, tensor_parallel=1, pipeline_parallel=1)
