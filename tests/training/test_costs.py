"""Counts of FLOPs and parameters against arXiv 2104.04473 and real models."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest
import torch
from models import CPU, FLAGS

from megatron.errors import InputError
from megatron.faults.memory import check_memory
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.flops import attention_flops, flops_per_sample
from megatron.model.gpt import GPTModel
from megatron.optim.config import OptimizerConfig
from megatron.optim.layout import lay_out
from megatron.optim.optimizer import param_groups
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.recompute import Recompute
from megatron.reports.flops import exact_flops_per_sample, unused_parameters


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(24, 2304, 24), (96, 12288, 96), (128, 25600, 160)])
def test_flops_match_the_paper(layers: int, hidden: int, heads: int) -> None:
    s, v = 2048, 51200
    config = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, max_position_embeddings=s
    )
    # Equation 3 without recomputation: 72 instead of 96, and V / 12 instead of V / 16.
    paper = 72 * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (12 * layers * hidden))
    assert flops_per_sample(config, seq_length=s, padded_vocab_size=v, num_logits=s) == pytest.approx(
        paper, rel=1e-12
    )


def test_flops_with_swiglu_and_gqa() -> None:
    """Llama 2 70B's shape: 6 FLOPs per weight and token, plus those of attention."""
    config = ModelConfig(
        num_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        group_query_attention=True,
        num_query_groups=8,
        ffn_hidden_size=28672,
        swiglu=True,
        max_position_embeddings=4096,
        untie_embeddings_and_output_weights=True,
    )
    weights = 80 * (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672) + 8192 * 32000
    attention = 80 * 4 * 4096**2 * 8192
    assert (
        flops_per_sample(config, seq_length=4096, padded_vocab_size=32000, num_logits=4096)
        == 6 * 4096 * weights + 3 * attention
    )


def buckets(config: OptimizerConfig, *, replicas: int = 1, sharding: str = "no_shard", **fields) -> list:
    """Buckets of a model on the first of `replicas`, on the meta device."""
    with torch.device("meta"):
        model = GPTModel(ModelConfig(**fields), ModelContext(vocab_size=51200, padded_vocab_size=51200))
    axis = Axis(0, replicas, ranks=range(replicas))
    groups = param_groups(config, Mesh(device=CPU, dp=axis, dp_cp=axis), sharding=sharding)
    return lay_out([model], groups, bucket_size=10**8)


@pytest.mark.parametrize(
    ("billions", "layers", "hidden", "heads"), [(7.5, 36, 4096, 32), (1008.0, 128, 25600, 160)]
)
def test_parameters_match_the_paper(billions: float, layers: int, hidden: int, heads: int) -> None:
    """Equation 2, which omits the 2 h of the final normalization."""
    s, v = 2048, 51200
    shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    laid_out = buckets(OptimizerConfig(lr=1.0), max_position_embeddings=s, **shape)
    count = sum(entry.end - entry.start for bucket in laid_out for entry in bucket.flat_params)
    paper = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (v + s) / (12 * layers * hidden))
    assert count == round(paper) + 2 * hidden
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_model_that_does_not_fit_is_refused() -> None:
    config = OptimizerConfig(lr=1.0)
    small = buckets(config, num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=8)
    check_memory(small, config, half=False, device=CPU)
    shape = {"num_layers": 128, "hidden_size": 25600, "num_attention_heads": 160}
    for settings, half, terabytes in (
        ({}, False, "16,1"),
        ({}, True, "18,1"),
        ({"bf16_optimizer_states": True}, True, "14,1"),
        ({"optimizer": "sgd"}, False, "12,0"),
    ):
        config = OptimizerConfig(lr=1.0, **settings)
        large = buckets(config, max_position_embeddings=2048, **shape)
        with pytest.raises(InputError, match=rf"{terabytes}\d\d\.\d GB.*cpu has"):
            check_memory(large, config, half=half, device=CPU)


@pytest.mark.parametrize(
    ("sharding", "settings", "half", "each", "divided"),
    [
        # Bytes of a parameter that each of 512 replicas holds, and that they divide (arXiv 1910.02054, figure 1, with
        # gradients in fp32).
        ("no_shard", {}, True, 18, 0),
        ("optim", {}, True, 6, 12),
        ("optim_grads", {}, True, 2, 16),
        ("optim_grads_params", {}, True, 0, 18),
        ("optim_grads_params", {}, False, 0, 16),
        # Master weights and state are in host memory.
        ("no_shard", {"cpu_offload_optimizer": True}, True, 6, 0),
        ("no_shard", {"cpu_offload_optimizer": True}, False, 8, 0),
        ("optim_grads_params", {"cpu_offload_optimizer": True}, True, 0, 6),
    ],
)
def test_memory_of_shards_and_of_the_host(
    monkeypatch: pytest.MonkeyPatch, sharding: str, settings: dict, half: bool, each: int, divided: int
) -> None:
    h, layers, s, v, replicas = 7680, 36, 2048, 51200, 512
    count = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    config = OptimizerConfig(lr=1.0, **settings)
    shape = {"num_layers": layers, "hidden_size": h, "num_attention_heads": 64, "max_position_embeddings": s}
    laid_out = buckets(config, replicas=replicas, sharding=sharding, **shape)

    def refused(total: float) -> bool:
        properties = types.SimpleNamespace(total_memory=total)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        try:
            check_memory(laid_out, config, half=half, device=torch.device("cuda"))
        except InputError as error:
            assert "--data-parallel-sharding-strategy" in str(error)
            return True
        return False

    needed = count * (each + divided / replicas)
    assert refused(0.999 * needed) and not refused(1.001 * needed)


def test_a_run_is_refused_before_it_allocates(pretrain) -> None:
    """Two layers with 24 h² parameters take 16 bytes each."""
    sizes = "--num-layers 2 --hidden-size 204800 --num-attention-heads 1600 --no-torch-compile"
    with pytest.raises(InputError, match=r"16,[2-9]\d\d\.\d GB.*cpu has"):
        pretrain(*FLAGS.split(), *sizes.split(), "--vocab-size", 51199)


def exact(recompute: Recompute, *, causal: bool = True, sizes: tuple[int, ...] = (4, 4)) -> float:
    """Exact FLOPs of eight layers with h = 32, s = 64 and V = 128."""
    config = ModelConfig(num_layers=8, hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    shape = {"seq_length": 64, "padded_vocab_size": 128, "num_logits": 64}
    ends = list(itertools.accumulate(sizes))
    chunks = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return exact_flops_per_sample(config, **shape, causal=causal, recompute=recompute, chunks=chunks)


def test_exact_flops_with_causal_mask_and_recomputation() -> None:
    s, h, v = 64, 32, 128
    layer, square, logits = 24 * s * h**2, 4 * s * s * h, 2 * s * h * v
    half = square * (s + 1) / (2 * s)
    once = 3 * (8 * (layer + half) + logits)
    assert exact(Recompute()) == once
    assert exact(Recompute(), causal=False) == 3 * (8 * (layer + square) + logits)
    assert exact(Recompute("selective")) == once + 8 * half
    assert exact(Recompute("full", "uniform", 3)) == once + 8 * (layer + half)
    # Recomputes the first layer of each chunk.
    assert exact(Recompute("full", "block", 1)) == once + 2 * (layer + half)
    assert exact(Recompute("full", "block", 3), sizes=(2, 6)) == once + 5 * (layer + half)


GATED = {"swiglu": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True}
GATED |= {"normalization": "RMSNorm", "position_embedding_type": "rope", "max_position_embeddings": 4096}
MIXTURES: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral 8x7b": (
        32000,
        {
            "num_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "ffn_hidden_size": 14336,
            "num_experts": 8,
        }
        | {"group_query_attention": True, "num_query_groups": 8},
    ),
    "qwen3 30b a3b": (
        151936,
        {
            "num_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_experts": 128,
            "moe_router_topk": 8,
        }
        | {"group_query_attention": True, "num_query_groups": 4, "kv_channels": 128, "qk_layernorm": True}
        | {"moe_ffn_hidden_size": 768, "moe_router_pre_softmax": True},
    ),
    "olmoe": (
        50304,
        {
            "num_layers": 16,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_experts": 64,
            "moe_router_topk": 8,
        }
        | {"moe_ffn_hidden_size": 1024, "qk_layernorm": True, "qk_layernorm_all_heads": True},
    ),
    "deepseek v3": (
        129280,
        {"num_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "ffn_hidden_size": 18432}
        | {
            "num_experts": 256,
            "moe_router_topk": 8,
            "moe_ffn_hidden_size": 2048,
            "moe_layer_freq": "[0]*3+[1]*58",
        }
        | {"moe_shared_expert_intermediate_size": 2048, "moe_router_score_function": "sigmoid"}
        | {"moe_router_enable_expert_bias": True, "multi_latent_attention": True, "q_lora_rank": 1536}
        | {"kv_lora_rank": 512, "qk_layernorm": True},
    ),
}


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("mixtral 8x7b", 46.7, 12.9),  # arXiv 2401.04088
        ("qwen3 30b a3b", 30.5, 3.3),  # the model card
        ("olmoe", 6.9, 1.3),  # arXiv 2409.02060
        ("deepseek v3", 671.0, 36.7 + 0.9),  # README_WEIGHTS.md, which leaves out the embeddings of the input
    ],
)
def test_published_mixtures(name: str, billions: float, active: float) -> None:
    """Total and active parameters; a token's FLOPs are six for each active one but the embeddings of the input."""
    vocab, fields = MIXTURES[name]
    config, s = ModelConfig(**GATED, **fields), 4096
    with torch.device("meta"):
        model = GPTModel(config, ModelContext(vocab_size=vocab, padded_vocab_size=vocab))
    total = sum(p.numel() for p in model.parameters())
    used = total - unused_parameters(config)
    assert (total / 1e9, used / 1e9) == (pytest.approx(billions, abs=0.05), pytest.approx(active, abs=0.06))
    weights = used - vocab * config.hidden_size - sum(p.numel() for p in model.parameters() if p.dim() == 1)
    flops = flops_per_sample(config, seq_length=s, padded_vocab_size=vocab, num_logits=s)
    attention = 3 * config.num_layers * attention_flops(config, pairs=s * s)
    assert flops == pytest.approx(6 * s * weights + attention, rel=1e-12)


def test_exact_flops_of_recomputed_experts() -> None:
    shape = {"seq_length": 64, "padded_vocab_size": 128, "num_logits": 64, "causal": False}
    model = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    model |= {"num_experts": 4, "moe_layer_freq": "2", "moe_ffn_hidden_size": 16, "add_bias_linear": False}
    model |= {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True}
    chunks = [range(1), range(1, 4)]

    def exact_flops(recompute: Recompute, **fields: bool) -> float:
        config = ModelConfig(**model, **fields)
        return exact_flops_per_sample(config, **shape, recompute=recompute, chunks=chunks)

    once, layers = exact_flops(Recompute()), 2 * 64 * 4 * (4 * 32 * 32)
    squares, dense = 4 * 4 * 64 * 64 * 32, 2 * 2 * 64 * 2 * 32 * 128
    experts = 2 * 2 * 64 * (32 * 4 + 2 * 2 * 32 * 16)
    shared = 2 * 2 * 64 * (2 * 32 * 48 + 32)
    assert once == 3 * (layers + squares + dense + experts + shared + 2 * 64 * 32 * 128)
    assert exact_flops(Recompute(), moe_layer_recompute=True) == once + experts
    overlapped = {"moe_layer_recompute": True, "moe_shared_expert_overlap": True}
    assert exact_flops(Recompute(), **overlapped) == once + experts + shared
    # The first layer of each chunk: one with experts, one without.
    first = (layers + squares) / 2 + (dense + experts + shared) / 2
    block = Recompute("full", "block", 1)
    assert exact_flops(block) == once + first
    assert exact_flops(block, moe_layer_recompute=True) == once + first + experts
