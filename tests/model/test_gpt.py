"""GPT, against transformers' GPT-2 and Llama, and NVIDIA's own models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from models import flat, position_ids
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.checkpoint import model_config
from megatron.errors import InputError
from megatron.inference.kv_cache import KVCache
from megatron.inference.load import load_weights
from megatron.interop.nvidia.read import open_megatron
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.optim.config import OptimizerConfig
from megatron.optim.optimizer import Optimizer
from megatron.parallel.mesh import ALONE
from megatron.tokenizer.config import TokenizerConfig

CPU = torch.device("cpu")
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
SMALL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, **NO_DROPOUT}
LLAMA = {
    "swiglu": True,
    "ffn_hidden_size": 160,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
}
DEEPSEEK = {
    **LLAMA,
    "group_query_attention": False,
    "num_query_groups": None,
    "multi_latent_attention": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 10,
    "qk_layernorm": True,
    "init_method_std": 0.2,
    "use_rope_scaling": True,
    "rope_scaling_type": "yarn",
    "rope_scaling_original_length": 8,
    "mscale_all_dim": 0.7,
}
BLOOM = {"position_embedding_type": "alibi", "embed_layernorm": True}
WINDOWS = {"window_size": "5,0", "window_attn_skip_freq": "2"}
CACHED = {
    "gpt2": {},
    "llama": LLAMA,
    "bloom": BLOOM,
    "deepseek": DEEPSEEK,
    "windows": {**LLAMA, **WINDOWS, "rotary_base_local": 100.0, "no_rope_freq": "[0,1]"},
    "windows of all layers": {"window_size": "5,0"},
    "windows of latents": {**DEEPSEEK, **WINDOWS},
}


def make_gpt(vocab_size: int, **fields) -> GPTModel:
    config = ModelConfig(**{**SMALL, "max_position_embeddings": 32, **fields})
    model = GPTModel(config, ModelContext(vocab_size=vocab_size, padded_vocab_size=vocab_size))
    flat(model).initialize(1234)
    return model


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def joint_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int, width: int) -> Tensor:
    """Rows of separate q, k, v projections in the order of linear_qkv: queries, key and value of each group."""
    parts = [x.view(groups, -1, width, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def from_hf_gpt2(state: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    names = {
        "transformer.wte.weight": "embedding.word_embeddings.weight",
        "transformer.wpe.weight": "embedding.position_embeddings.weight",
        "transformer.ln_f.": "decoder.final_layernorm.",
        "transformer.h.": "decoder.layers.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".pre_mlp_layernorm.",
        ".attn.c_attn.": ".self_attention.linear_qkv.",
        ".attn.c_proj.": ".self_attention.linear_proj.",
        ".mlp.c_fc.": ".mlp.linear_fc1.",
        ".mlp.c_proj.": ".mlp.linear_fc2.",
    }
    result = {}
    for name, tensor in state.items():
        if name == "lm_head.weight":
            continue  # tied
        if ".c_" in name and name.endswith("weight"):
            tensor = tensor.t()
        if ".c_attn." in name:
            tensor = joint_qkv(*tensor.chunk(3), heads, tensor.shape[0] // 3 // heads)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        result[name] = tensor
    return result


def from_hf_llama(state: dict[str, Tensor], groups: int, width: int) -> dict[str, Tensor]:
    names = {
        "model.embed_tokens.": "embedding.word_embeddings.",
        "model.norm.": "decoder.final_layernorm.",
        "lm_head.": "output_layer.",
        "model.layers.": "decoder.layers.",
        ".post_attention_layernorm.": ".pre_mlp_layernorm.",
        ".self_attn.o_proj.": ".self_attention.linear_proj.",
        ".mlp.down_proj.": ".mlp.linear_fc2.",
        ".self_attn.q_proj.": ".self_attention.linear_qkv.",
        ".mlp.gate_proj.": ".mlp.linear_fc1.",
    }
    result = {}
    for name, tensor in state.items():
        if ".k_proj." in name or ".v_proj." in name or ".up_proj." in name:
            continue
        if ".q_proj." in name:
            k, v = (state[name.replace("q_proj", x)] for x in ("k_proj", "v_proj"))
            tensor = joint_qkv(tensor, k, v, groups, width)
        if ".gate_proj." in name:
            tensor = torch.cat((tensor, state[name.replace("gate_proj", "up_proj")]))
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        result[name] = tensor
    return result


def compare_with_hf(ours: GPTModel, hf: torch.nn.Module, convert) -> None:
    torch.manual_seed(0)
    for p in hf.parameters():
        p.data.normal_(std=0.2)
    ours.load_state_dict(convert(hf.state_dict()))
    hf.eval()
    tokens = torch.randint(ours.context.vocab_size, (3, 32))
    labels = torch.randint(ours.context.vocab_size, (3, 32))
    ours.zero_grad(set_to_none=False)
    logits = ours(tokens, position_ids(0, 3, 32, CPU))
    theirs = hf(tokens).logits
    assert relative_error(logits, theirs) < 1e-5
    ours(tokens, position_ids(0, 3, 32, CPU), labels_bs=labels).mean().backward()
    torch.nn.functional.cross_entropy(theirs.flatten(0, 1), labels.flatten()).backward()
    gradients = convert({name: p.grad for name, p in hf.named_parameters()})
    for name, p in ours.named_parameters():
        # The biases of keys cancel in the softmax. Their gradient is a rounding error, small against the rest of qkv.
        assert relative_error(p.grad, gradients[name]) < 1e-4, name


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_equals_transformers_gpt2(activation: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=100,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=4,
        activation_function=activation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    ours = make_gpt(100, bias_gelu_fusion=activation == "gelu_new")
    compare_with_hf(ours, transformers.GPT2LMHeadModel(config), lambda state: from_hf_gpt2(state, heads=4))


def test_equals_transformers_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    )
    ours = make_gpt(100, **LLAMA)
    compare_with_hf(ours, transformers.LlamaForCausalLM(config), lambda state: from_hf_llama(state, 2, 16))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_equals_megatron_core(shared: Path, kind: str) -> None:
    """Compare logits, gradients, and the losses and weights of three steps of AdamW."""
    tensors = load_file(shared / "vectors" / "core-head" / f"{kind}.safetensors")
    losses = json.loads((shared / "vectors" / "core-head" / f"{kind}.json").read_text())["losses"]
    part = lambda prefix: {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}  # noqa: E731
    model = make_gpt(512, **({"bias_gelu_fusion": False} if kind == "gpt2" else LLAMA))
    config = OptimizerConfig(lr=1e-3, adam_beta2=0.95, clip_grad=0.0)
    buffer = flat(model, optimizer=config)
    model.load_state_dict(part("state_dict/"))
    optimizer = Optimizer(buffer, config)
    positions = position_ids(0, 4, 32, CPU)
    assert relative_error(model(tensors["tokens"], positions), tensors["logits"]) < 1e-6
    for step, expected in enumerate(losses):
        loss = model(tensors["tokens"], positions, labels_bs=tensors["labels"]).mean()
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        loss.backward()
        if step == 0:
            for name, grad in part("grads/").items():
                assert relative_error(model.get_parameter(name).grad, grad) < 1e-5, name
        optimizer.step(lr=1e-3, weight_decay=0.0)
    for name, weight in part("state_dict_after/").items():
        # The gradient of the keys' biases is a rounding error, which Adam amplifies to steps of up to lr.
        torch.testing.assert_close(model.get_parameter(name).data, weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("written_by", ["init_tp1", "init_tp2", "init_pp2"])
def test_equals_megatron_v25(shared: Path, written_by: str) -> None:
    """Logits of a model of 2021, from its own checkpoint."""
    folder = shared / "vectors" / "gpt-v2.5" / written_by
    checkpoint = open_megatron(folder, TokenizerConfig())
    model = GPTModel(model_config(checkpoint), ModelContext(vocab_size=5000, padded_vocab_size=5120))
    load_weights(checkpoint, model, torch.float32)
    tokens = torch.from_numpy(np.load(folder / "ref_input.npy")).long()
    expected = torch.from_numpy(np.load(folder / "ref_logits.npy"))
    logits = model(tokens, position_ids(0, *tokens.shape, CPU))[..., :5000]
    assert relative_error(logits, expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("fields", CACHED.values(), ids=CACHED)
def test_cache_gives_the_same_logits(fields: dict) -> None:
    model = make_gpt(100, **fields)
    tokens = torch.randint(100, (2, 20), generator=torch.Generator().manual_seed(0))
    whole = model(tokens, position_ids(0, 2, 20, CPU))
    cache = KVCache(model.config, range(2), ALONE, rows=3, length=20, dtype=torch.float32, device=CPU)
    pieces = []
    for start, end in ((0, 7), (7, 8), (8, 15), (15, 16), (16, 20)):
        rows = cache.rows(1, [start, start], [end - start] * 2)
        pieces.append(model(tokens[:, start:end], rows.position_ids_bs, cache=rows))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("fields", CACHED.values(), ids=CACHED)
def test_cache_rows_of_different_lengths(fields: dict) -> None:
    model = make_gpt(100, **fields)
    tokens = torch.randint(100, (2, 20), generator=torch.Generator().manual_seed(0))
    whole = model(tokens, position_ids(0, 2, 20, CPU))
    cache = KVCache(model.config, range(2), ALONE, rows=3, length=20, dtype=torch.float32, device=CPU)
    # The first prompt has 9 tokens, the second 5 and then padding.
    prompts = cache.rows(0, [0, 0], [9, 5])
    model(tokens[:, :9], prompts.position_ids_bs, cache=prompts)
    cache.copy([0, 1], [1, 0], 9)
    tokens, whole = tokens.flip(0), whole.flip(0)
    for length, starts in ((1, [5, 9]), (3, [6, 10]), (1, [9, 11])):
        new = torch.stack([row[start : start + length] for row, start in zip(tokens, starts, strict=True)])
        rows = cache.rows(0, starts, [length, 1])
        logit_positions = torch.tensor([1, 0]), torch.tensor([length - 1, 0])
        logits = model(new, rows.position_ids_bs, cache=rows, logit_positions=logit_positions)
        expected = torch.stack((whole[1, starts[1] + length - 1], whole[0, starts[0]]))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, LLAMA], ids=["gpt2", "llama"])
def test_documents_do_not_attend_to_each_other(fields: dict) -> None:
    """With document ids and positions that restart, two packed documents equal two samples."""
    model = make_gpt(100, **fields)
    tokens = torch.randint(100, (1, 24), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 10 + [1] * 14])
    positions = torch.cat((torch.arange(10), torch.arange(14))).unsqueeze(0)
    packed = model(tokens, positions, document_ids_bs=documents)
    first = model(tokens[:, :10], position_ids(0, 1, 10, CPU))
    second = model(tokens[:, 10:], position_ids(0, 1, 14, CPU))
    torch.testing.assert_close(packed, torch.cat((first, second), dim=1), rtol=1e-4, atol=1e-5)


def test_vocabulary_padding_changes_nothing() -> None:
    tokens = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for padded in (100, 128, 1024):
        config = ModelConfig(**SMALL, max_position_embeddings=32)
        model = GPTModel(config, ModelContext(vocab_size=100, padded_vocab_size=padded))
        flat(model).initialize(7)
        loss = model(tokens, position_ids(0, 2, 16, CPU), labels_bs=tokens).mean()
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.embedding.word_embeddings.weight.grad)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)
    torch.testing.assert_close(gradients[2][:100], gradients[0], rtol=1e-5, atol=1e-8)
    assert not gradients[2][100:].any()


def test_no_mask_padded_vocab_keeps_padded_logits() -> None:
    config = ModelConfig(**SMALL, max_position_embeddings=32, mask_padded_vocab=False)
    model = GPTModel(config, ModelContext(vocab_size=100, padded_vocab_size=128))
    flat(model).initialize(7)
    tokens = torch.randint(100, (1, 8), generator=torch.Generator().manual_seed(0))
    assert model(tokens, position_ids(0, 1, 8, CPU)).shape == (1, 8, 128)


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"num_attention_heads": 5}, "--num-attention-heads"),
        ({"group_query_attention": True, "num_query_groups": 3}, "--num-query-groups"),
        ({"num_query_groups": 2}, "--num-query-groups"),
        ({"position_embedding_type": "rope", "rotary_percent": 0.01}, "--rotary-percent"),
        ({"hidden_dropout": 1.5}, "--hidden-dropout"),
        ({"normalization": "BatchNorm"}, "--normalization"),
        ({"num_layers": None}, "--num-layers"),
    ],
)
def test_invalid_sizes(fields: dict, flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        ModelConfig(**{**SMALL, "max_position_embeddings": 32, **fields})


def test_config_round_trip() -> None:
    for fields in ({}, LLAMA):
        config = ModelConfig(**{**SMALL, "max_position_embeddings": 32, **fields})
        assert ModelConfig(**dataclasses.asdict(config)) == config
