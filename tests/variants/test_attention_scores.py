"""Scale, soft caps, sinks and interleaved RoPE against formulas in fp64. tests/interop compares whole models."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of
from torch import Tensor

from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.model.gpt import GPTModel
from megatron.ops.rotary import apply_rotary_emb, rotary_angles
from megatron.parallel.mesh import Mesh
from megatron.plugins import run
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training.build import build_engine
from megatron.variants.attention_scores import ScoreAttention, halves

B, N, G, S, D = 2, 4, 2, 12, 8
BASE = "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2"
GROUPED = f"{BASE} --group-query-attention --num-query-groups 2"


def build(flags: str, padded: int = 64) -> GPTModel:
    engine = build_engine(config_of(flags), GPT, Mesh(device=CPU), vocab_size=60, padded_vocab_size=padded)
    engine.buffer.initialize(1)
    (model,) = engine.model.modules
    assert isinstance(model, GPTModel)
    return model


def attention_of(flags: str) -> ScoreAttention:
    attention = build(f"{GROUPED} {flags}").decoder.layers["0"].self_attention
    assert isinstance(attention, ScoreAttention)
    return attention


def reference(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The definition, head by head, with exponentials and sums."""
    outs = []
    for head in range(N):
        group = head // (N // G)
        scores = q[:, head] @ k[:, group].transpose(1, 2) / math.sqrt(D)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        exponentials = scores.exp() * allowed
        total = exponentials.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks[head].exp()
        outs.append(exponentials / total @ v[:, group])
    return torch.stack(outs, dim=1)


@pytest.mark.parametrize("mask", ["causal", "window", "documents", "none"])
@pytest.mark.parametrize(
    ("flags", "softcap", "kind"),
    [
        ("--attn-logit-softcapping 0.7", 0.7, None),
        ("--softmax-type off-by-one", None, "off-by-one"),
        ("--softmax-type learnable", None, "learnable"),
        ("--softmax-type learnable --attn-logit-softcapping 0.7", 0.7, "learnable"),
    ],
)
def test_attention_equals_the_definition(
    flags: str, softcap: float | None, kind: str | None, mask: str
) -> None:
    """Values and gradients, also of the learned scores."""
    attention = attention_of(flags)
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(B, n, S, D, generator=generator) for n in (N, G, G, N))
    distance = torch.arange(S).unsqueeze(1) - torch.arange(S)
    allowed = {
        "causal": distance >= 0,
        "window": (distance >= 0) & (distance < 4),
        "documents": (distance >= 0) & (torch.arange(S).unsqueeze(1) // 5 == torch.arange(S) // 5),
        "none": torch.ones(S, S, dtype=torch.bool),
    }[mask]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    sinks = None if kind is None else torch.zeros(N, dtype=torch.float64)
    if attention.core_attention is not None:
        sinks = attention.core_attention.softmax_offset.detach().double().requires_grad_()
    dense = None if mask in ("causal", "none") else allowed.view(1, 1, S, S)
    out = attention.attend(*inputs, mask_bnst=dense, causal=mask == "causal", dropout=0.0)
    expected = reference(*doubles, allowed, softcap, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    (out * weight).sum().backward()
    (expected * weight.double()).sum().backward()
    for ours, theirs in zip(inputs, doubles, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)
    if attention.core_attention is not None:
        grad = attention.core_attention.softmax_offset.main_grad
        torch.testing.assert_close(grad.double(), sinks.grad, rtol=1e-4, atol=1e-5)


def test_a_bias_is_added_after_the_cap() -> None:
    """ALiBi's bias is no score, so that the cap does not bound it."""
    flags = f"{BASE} --position-embedding-type alibi --num-layers 1"
    tokens, positions = torch.randint(59, (2, 16)), torch.arange(16).expand(2, 16)
    capped = build(f"{flags} --attn-logit-softcapping 1e4")
    torch.testing.assert_close(
        capped(tokens, positions), build(flags)(tokens, positions), rtol=1e-4, atol=1e-5
    )


def test_scale_multiplies_scores_in_place_of_the_root() -> None:
    model, tokens = build(f"{GROUPED} --softmax-scale 0.11"), torch.randint(59, (2, 16))
    plain = build(GROUPED)
    positions = torch.arange(16).expand(2, 16)
    for layer in plain.decoder.layers.values():  # queries are the first two of a group's four heads
        rows = layer.self_attention.linear_qkv.weight.data.view(2, 4, 8, -1)
        rows[:, :2] *= 0.11 * math.sqrt(8)
    torch.testing.assert_close(model(tokens, positions), plain(tokens, positions), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_interleaved_rope_rotates_adjacent_channels(percent: float) -> None:
    """Scores of queries and keys equal those of complex numbers made of adjacent channels, in fp64."""
    channels = int(D * percent)
    q, k = (torch.randn(B, N, S, D, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    positions = torch.arange(S).expand(B, S)
    angles = rotary_angles(positions, channels, 100.0)
    ours = [apply_rotary_emb(halves(x, channels), *angles) for x in (q, k)]

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.double()[..., :channels].unflatten(-1, (-1, 2)).contiguous())
        frequencies = 100.0 ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
        turned = pairs * torch.polar(torch.ones(()).double(), torch.arange(S).unsqueeze(1) * frequencies)
        return torch.cat((torch.view_as_real(turned).flatten(-2), x.double()[..., channels:]), dim=-1)

    expected = rotated(q) @ rotated(k).transpose(-1, -2)
    torch.testing.assert_close((ours[0] @ ours[1].transpose(-1, -2)).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_model_with_interleaved_rope_differs() -> None:
    tokens, positions = torch.randint(59, (2, 16)), torch.arange(16).expand(2, 16)
    rope = f"{BASE} --position-embedding-type rope"
    plain, interleaved = build(rope), build(f"{rope} --rotary-interleaved")
    assert not torch.allclose(plain(tokens, positions), interleaved(tokens, positions))


@pytest.mark.parametrize("padded", [60, 64])
def test_loss_of_capped_logits(padded: int) -> None:
    """The chunked loss and its gradients equal a cross entropy of the capped logits in fp64."""
    flags = f"{BASE} --final-logit-softcapping 0.5 --untie-embeddings-and-output-weights"
    model, generator = build(flags, padded), torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(59, (2, 16), generator=generator) for _ in "tl")
    positions, weight = torch.arange(16).expand(2, 16), torch.rand(2, 16, generator=generator)
    gradients = []

    def backward(total: Tensor) -> None:
        total.backward()
        gradients.append([p.main_grad.clone() for p in model.parameters()])
        for p in model.parameters():
            p.main_grad.zero_()

    logits = model(tokens, positions)
    assert logits.abs().max() < 0.5
    flat = logits.double().flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(flat, labels.flatten(), reduction="none")
    backward((expected * weight.double().flatten()).sum())
    losses = model(tokens, positions, labels_bs=labels, loss_grad_bs=weight)
    torch.testing.assert_close(losses.double().flatten(), expected, rtol=1e-5, atol=1e-6)
    backward((losses * weight).sum())
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--multi-latent-attention --position-embedding-type rope --softmax-type learnable",
            "--multi-latent-attention and --softmax-type learnable exclude each other; leave one of them out",
        ),
        ("--rotary-interleaved", "--rotary-interleaved needs --position-embedding-type rope"),
        ("--sandwich-norm --norm-after", "--norm-after and --sandwich-norm exclude each other"),
    ],
)
def test_impossible_combinations(flags: str, message: str) -> None:
    config = parse_run_config(f"{RUN} {flags}".split(), description="", defaults=DEFAULTS)
    with pytest.raises(InputError, match=message):
        run(config, GPT)


RUN = f"""
    {BASE} --mock-data --tokenizer-type NullTokenizer --vocab-size 59 --num-layers 4 --hidden-size 32
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 2e-3
    --device cpu --num-workers 0 --log-interval 1 --eval-iters 1
"""
ALL = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm
    --group-query-attention --window-size 5,0 --window-attn-skip-freq 2 --rotary-base-local 100 --sandwich-norm
    --softmax-type learnable --softmax-scale 0.3 --attn-logit-softcapping 3 --final-logit-softcapping 2
    --rotary-interleaved --no-rope-freq 4
"""

TWO_LAYERS = "--num-layers 2 --no-rope-freq 2"  # compiled layers have a graph for each kind
DOCUMENTS = "--reset-attention-mask --reset-position-ids"


def train(folder: str, flags: str) -> None:
    words = f"{RUN} {ALL} {flags} --metrics-path {folder}/metrics.jsonl".split()
    assert run(parse_run_config(words, description="", defaults=DEFAULTS), GPT) == 0


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
        pytest.param(2, "--use-distributed-optimizer --overlap-grad-reduce", marks=pytest.mark.slow),
        pytest.param(1, "--recompute-granularity selective", marks=pytest.mark.slow),
        pytest.param(1, "--recompute-granularity full --recompute-method uniform", marks=pytest.mark.slow),
        pytest.param(1, f"--ops-backend compile {TWO_LAYERS}", marks=pytest.mark.slow),
        pytest.param(1, f"--ops-backend layers {TWO_LAYERS}", marks=pytest.mark.slow),
        pytest.param(1, DOCUMENTS, marks=pytest.mark.slow),
    ],
)
def test_layouts_train_alike(tmp_path: Path, processes: int, flags: str) -> None:
    """Losses and grad norms of four steps with all flags at once equal those of one process."""
    records = []
    for count, given in ((1, "--ops-backend plain"), (processes, flags)):
        # Flags that change the model or its data are for both.
        same = " ".join(shared for shared in (TWO_LAYERS, DOCUMENTS) if shared in flags)
        folder = tmp_path / f"{count}{len(records)}"
        folder.mkdir()
        run_distributed(train, count, str(folder), f"{given} {same} --num-query-groups 2")
        records.append([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
    assert len(records[0]) == len(records[1]) >= 5
    for one, other in zip(*records, strict=True):
        for key in one.keys() & {"lm loss", "lm loss validation", "grad norm"}:
            assert other[key] == pytest.approx(one[key], rel=1e-5)
