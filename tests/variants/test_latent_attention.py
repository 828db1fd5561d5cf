"""Multi-head latent attention, against DeepSeek-V2 and V3 in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of

from megatron.errors import InputError
from megatron.inference.batching import Batcher, Request
from megatron.inference.config import InferenceConfig
from megatron.inference.driver import driver
from megatron.inference.kv_cache import KVCache
from megatron.inference.load import load_gpt
from megatron.inference.predictor import Predictor
from megatron.inference.sampling import SamplingConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.parallel.mesh import ALONE, Mesh
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.config import TokenizerConfig

LATENT = """
    --multi-latent-attention --kv-lora-rank 24 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 10 --qk-layernorm
    --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
"""
YARN = """
    --use-rope-scaling --rope-scaling-type yarn --rope-scaling-factor 4 --rope-scaling-original-length 8
    --mscale 0.9 --mscale-all-dim 0.7
"""
# The same in config.json of transformers.
SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,  # all layers
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
}
THEIR_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
}
# Modules of transformers, by those of this program. The weights have the same layout, except that gate and up are one.
LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.gate_proj mlp.up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}
ENDS = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}


def their_tensor(name: str, theirs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor of transformers for a parameter of this program."""
    module = name.removesuffix(".weight")
    if module in ENDS:
        return theirs[f"{ENDS[module]}.weight"]
    _, _, layer, module = module.split(".", 3)
    return torch.cat([theirs[f"model.layers.{layer}.{part}.weight"] for part in LAYER[module].split()])


@pytest.mark.parametrize("yarn", [False, True], ids=["", "yarn"])
@pytest.mark.parametrize("q_lora_rank", [None, 20])
@pytest.mark.parametrize("version", ["V2", "V3"])
def test_as_transformers(version: str, q_lora_rank: int | None, yarn: bool) -> None:
    transformers = pytest.importorskip("transformers")
    fields = SIZES | {"q_lora_rank": q_lora_rank} | ({"rope_parameters": THEIR_YARN} if yarn else {})
    torch.manual_seed(0)
    theirs = getattr(transformers, f"Deepseek{version}ForCausalLM")(
        getattr(transformers, f"Deepseek{version}Config")(**fields)
    )
    for p in theirs.parameters():
        p.data.normal_(std=0.3)
    flags = f"{LATENT} --num-layers 2 --ffn-hidden-size 64 --seq-length 32"
    flags += f" --q-lora-rank {q_lora_rank}" if q_lora_rank else ""
    config = config_of(f"{flags} {YARN if yarn else ''}").model
    ours = GPTModel(config, ModelContext(vocab_size=60, padded_vocab_size=60))
    weights = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        p.data = their_tensor(name, weights).detach().clone()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in weights.values())

    tokens, cotangent = torch.randint(60, (2, 24)), torch.randn(2, 24, 60)
    logits = ours(tokens, torch.arange(24).expand(2, 24))
    expected = theirs(tokens).logits
    (logits * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    assert_close(logits, expected)
    grads = {name: p.grad for name, p in weights.items()}
    for name, p in ours.named_parameters():
        assert_close(p.grad, their_tensor(name, grads))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found - expected).norm() / expected.norm()
    assert error < 1e-5, float(error)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            f"{LATENT} --group-query-attention",
            "--group-query-attention and --multi-latent-attention exclude each other; drop one",
        ),
        (
            f"{LATENT} --position-embedding-type learned_absolute",
            "--multi-latent-attention needs --position-embedding-type rope, not learned_absolute",
        ),
        (
            f"{LATENT} --rotary-percent 0.5",
            "--multi-latent-attention needs --rotary-percent 1.0, not 0.5",
        ),
        (
            f"{LATENT} --add-qkv-bias",
            "--add-qkv-bias and --multi-latent-attention exclude each other; drop one",
        ),
        (
            f"{LATENT} --qk-layernorm-all-heads",
            "--qk-layernorm-all-heads and --multi-latent-attention exclude each other; drop one",
        ),
        (
            f"{LATENT} --kv-channels 8",
            "--kv-channels: 8 is not --qk-head-dim 12 plus --qk-pos-emb-head-dim 8; leave it out",
        ),
        (
            f"{LATENT} --qk-pos-emb-head-dim 7",
            "--qk-pos-emb-head-dim: 7 is odd, but RoPE rotates channels in pairs",
        ),
        (
            f"{LATENT} --mscale-all-dim 1",
            "--mscale 1.0 and --mscale-all-dim 1.0 need --use-rope-scaling and --rope-scaling-type yarn",
        ),
        (
            f"{LATENT} {YARN} --rope-scaling-attention-factor 2",
            "--mscale 0.9 and --rope-scaling-attention-factor exclude each other; drop one",
        ),
        ("--qk-head-dim 64", "--qk-head-dim: 64 needs --multi-latent-attention"),
        ("--q-lora-rank 64", "--q-lora-rank: 64 needs --multi-latent-attention"),
        (f"{LATENT} --kv-lora-rank 0", "--kv-lora-rank: 0 is too small; it must be at least 1"),
    ],
)
def test_impossible_combinations(flags: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        config_of(flags)
    assert str(caught.value) == message


def test_the_cache_holds_latents() -> None:
    """A token takes the widths of the latent and of the shared key, in every layer and for all heads."""
    config = config_of(LATENT).model
    cache = KVCache(config, range(2), ALONE, rows=3, length=5, dtype=torch.float32, device=CPU)
    assert cache.memory.shape == (2, 1, 3, 1, 5, 24 + 8)


LENGTH, EOD = 20, 59
TOKENIZER = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=EOD)
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3]]


def generate_with_cache(folder: str, tensor: int) -> list[list[int]] | None:
    """Greedy continuations of more prompts than the batch has rows."""

    def work(predictor: Predictor, tokenizer: Tokenizer) -> list[list[int]]:
        predictor.reserve(2, LENGTH)
        batcher = Batcher(predictor, tokenizer)
        greedy = SamplingConfig(out_seq_length=LENGTH, greedy=True)
        states = [batcher.add(Request(prompt=prompt, sampling=greedy)) for prompt in PROMPTS]
        while batcher.waiting or batcher.running:
            batcher.step()
        return [state.new for state in states]

    config = InferenceConfig(load=folder, tensor_model_parallel_size=tensor)
    return driver(config, TOKENIZER, work)


def test_generation_equals_passes_over_all_tokens(pretrain: Callable, tmp_path: Path) -> None:
    flags = f"""
        {LATENT} --q-lora-rank 20 {YARN} --init-method-std 0.2 --num-layers 2 --hidden-size 32 --num-attention-heads 4
        --seq-length {LENGTH} --mock-data --tokenizer-type NullTokenizer --vocab-size {EOD} --micro-batch-size 2
        --global-batch-size 2 --train-iters 1 --eval-iters 0 --lr 1e-3 --num-workers 0 --device cpu --save {tmp_path}
    """
    pretrain(*flags.split())
    model, _ = load_gpt(InferenceConfig(load=str(tmp_path)), TOKENIZER, Mesh(device=CPU))
    expected = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        while len(tokens) < LENGTH and tokens[-1] != EOD:
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), torch.arange(len(tokens)).unsqueeze(0))
            tokens.append(int(logits[0, -1].argmax()))
        expected.append([token for token in tokens[len(prompt) :] if token != EOD])
    assert len({token for tokens in expected for token in tokens}) > 10
    assert generate_with_cache(str(tmp_path), 1) == expected
    found, _ = run_distributed(generate_with_cache, 2, str(tmp_path), 2)
    assert found == expected
