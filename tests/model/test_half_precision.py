"""Half-precision and fp32 computations, against a plain PyTorch implementation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from models import CPU, flat, position_ids
from torch import Tensor

from megatron.model.bert import BertModel
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.ops.attention import attention
from megatron.parallel.random import DropoutKey

HALF = [torch.bfloat16, torch.float16]


def make(dtype: torch.dtype, layers: int, **fields: object) -> GPTModel:
    settings = {
        "num_layers": layers,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
    }
    config = ModelConfig(**settings, attention_dropout=0.0, hidden_dropout=0.0, **fields)
    model = GPTModel(config, ModelContext(vocab_size=50, padded_vocab_size=50))
    flat(model, dtype).initialize(3)
    return model


def plain_logits(model: GPTModel, tokens_bs: Tensor, *, post_norm: bool) -> Tensor:
    """GPT-2's logits with a residual stream in fp32; weights and inputs of layers keep their own dtype."""
    weights = dict(model.named_parameters())
    dtype = weights["embedding.word_embeddings.weight"].dtype

    def norm(x: Tensor, name: str) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        scale = weights[f"{name}.weight"].float(), weights[f"{name}.bias"].float()
        return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale[0] + scale[1]

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def attend(x: Tensor, name: str) -> Tensor:
        b, s, h = x.shape
        q, k, v = linear(x, f"{name}.linear_qkv").view(b, s, 4, 3, h // 4).permute(3, 0, 2, 1, 4).float()
        scores = q @ k.transpose(-2, -1) / math.sqrt(h // 4)
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -math.inf)
        out = (scores.softmax(-1) @ v).to(dtype)
        return linear(out.transpose(1, 2).reshape(b, s, h), f"{name}.linear_proj")

    x = F.embedding(tokens_bs, weights["embedding.word_embeddings.weight"])
    x = (x + weights["embedding.position_embeddings.weight"][: tokens_bs.shape[1]]).float()
    for i in range(model.config.num_layers):
        name = f"decoder.layers.{i}"
        normed = norm(x, f"{name}.input_layernorm")
        x = (normed if post_norm else x) + attend(normed.to(dtype), f"{name}.self_attention").float()
        normed = norm(x, f"{name}.pre_mlp_layernorm")
        inner = F.gelu(linear(normed.to(dtype), f"{name}.mlp.linear_fc1"), approximate="tanh")
        x = (normed if post_norm else x) + linear(inner, f"{name}.mlp.linear_fc2").float()
    x = norm(x, "decoder.final_layernorm").to(dtype)
    return x @ weights["embedding.word_embeddings.weight"].t()


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_fp32_residual_connection(dtype: torch.dtype, post_norm: bool) -> None:
    fields = {"apply_residual_connection_post_layernorm": post_norm}
    model = make(dtype, 12, fp32_residual_connection=True, **fields)
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens, position_ids(0, 2, 16, CPU))
        theirs = plain_logits(model, tokens, post_norm=post_norm)
        without = make(dtype, 12, **fields)(tokens, position_ids(0, 2, 16, CPU))
    assert ours.dtype == dtype
    # Attention rounds at different places than the plain implementation.
    assert distance(ours, theirs) < 0.5 * distance(without, theirs)


@pytest.mark.parametrize("dtype", HALF)
def test_fp32_residual_connection_is_closer_to_fp32(dtype: torch.dtype) -> None:
    """A half-precision residual stream is rounded in each of many layers."""
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
    distances = []
    for fp32 in (True, False):
        model, exact = make(dtype, 24, fp32_residual_connection=fp32), make(torch.float32, 24)
        exact.load_state_dict({name: p.float() for name, p in model.state_dict().items()})
        logits = [one(tokens, position_ids(0, 2, 16, CPU)).detach() for one in (model, exact)]
        distances.append(distance(*logits))
    assert distances[0] < 0.7 * distances[1]


def test_bert_with_an_fp32_residual_connection() -> None:
    settings = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "max_position_embeddings": 16}
    config = ModelConfig(**settings, fp32_residual_connection=True)
    model = BertModel(config, ModelContext(vocab_size=50, padded_vocab_size=50), binary_head=True)
    buffer = flat(model, torch.bfloat16)
    buffer.initialize(3)
    tokens = torch.randint(50, (2, 16))
    losses, order = model(
        tokens, None, torch.zeros_like(tokens), labels_bp=tokens, dropout_key=DropoutKey(1, 2)
    )
    assert (losses.dtype, order.dtype) == (torch.float32, torch.bfloat16)
    (losses.sum() + order.float().sum()).backward()
    assert buffer.grads.isfinite().all() and buffer.grads.any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_softmax_of_attention_is_fp32(dtype: torch.dtype, backward: bool, device: str) -> None:
    """Attention scores far above 65504, the largest number of fp16, that differ by less than half precision resolves.

    `--attention-softmax-in-fp32` is therefore always on, and `--apply-query-key-layer-scaling`, which keeps scores
    small in fp16, is not needed.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 32, 64, generator=generator).to(dtype) for _ in range(3))
    q[..., 0], k[..., 0] = 512.0, 512.0  # adds 2^18 to every score, which cancels in the softmax
    if dtype == torch.float16:
        assert (q @ k.transpose(-2, -1)).isinf().all()
    results = []
    for kind in (dtype, torch.float64):
        x = [tensor.to(device, kind).requires_grad_() for tensor in (q, k, v)]
        out = attention(*x, mask_bnst=None, causal=True, dropout=0.0)
        results.append(torch.autograd.grad(out.sum(), x[2])[0] if backward else out.detach())
    assert distance(results[0], results[1]) < 0.02
