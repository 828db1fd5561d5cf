"""Attention within documents on a CPU, against the softmax of all scores in fp64."""

from __future__ import annotations

import pytest
import torch
from models import CPU, config_of, flat, position_ids

from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.ops.attention import MaskSpec, make_mask
from megatron.ops.backend import Ops, choose_ops
from megatron.ops.config import OpsConfig
from megatron.ops.cpu.attention import padded_attention
from megatron.ops.cpu.document_attention import (
    MERGED_LENGTH,
    DocumentMask,
    attention_by_document,
    document_lengths,
    make_document_mask,
)

# Tokens of the documents of three sequences: few, one, and many of which most are short.
LENGTHS = ([200, 40, 60], [300], [1, 2, 70, 1, 1, 1, 30, 30, 30, 100, 34])


def documents() -> torch.Tensor:
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
    return torch.stack(rows)


def spec_of(**fields: object) -> MaskSpec:
    return MaskSpec(length=300, document_ids_bs=documents(), device=CPU, **fields)


def heads(n: int, g: int, width: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Queries of n heads, keys and values of g heads, laid out as the model has them."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((n, 16), (g, 16), (g, width))
    return [
        torch.randn(300, 3, heads, d, generator=generator).to(dtype).permute(1, 2, 0, 3).requires_grad_()
        for heads, d in shapes
    ]


def formula(
    q_bnsd: torch.Tensor, k_bgsd: torch.Tensor, v_bgsd: torch.Tensor, allowed_bss: torch.Tensor
) -> torch.Tensor:
    k, v = (x.repeat_interleave(q_bnsd.shape[1] // x.shape[1], dim=1) for x in (k_bgsd, v_bgsd))
    scores = (q_bnsd @ k.transpose(2, 3)) / q_bnsd.shape[-1] ** 0.5
    return scores.masked_fill(~allowed_bss.unsqueeze(1), -torch.inf).softmax(-1) @ v


def allowed(causal: bool, window: int | None) -> torch.Tensor:
    s, t, ids = torch.arange(300).unsqueeze(1), torch.arange(300), documents()
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    near = (s - t).abs() <= (300 if window is None else window)
    return same & near & ((s >= t) if causal else (s == s))


@pytest.mark.parametrize(("n", "g", "width"), [(4, 4, 16), (4, 2, 16), (4, 4, 10)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 50])
def test_equals_the_formula(n: int, g: int, width: int, causal: bool, window: int | None) -> None:
    inputs, found = heads(n, g, width), []
    mask = make_document_mask(spec_of(causal=causal, window=window))
    assert isinstance(mask, DocumentMask)
    for out in (
        attention_by_document(padded_attention, *inputs, mask_bnst=mask, causal=causal, dropout=0.0),
        formula(*inputs, allowed(causal, window)),
    ):
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        found.append((out, *torch.autograd.grad((out * weights).sum(), inputs)))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_in_bf16() -> None:
    inputs = heads(4, 2, 16, torch.bfloat16)
    mask = make_document_mask(spec_of())
    out = attention_by_document(padded_attention, *inputs, mask_bnst=mask, causal=True, dropout=0.0)
    expected = formula(*(x.double() for x in inputs), allowed(True, None))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.02)


def test_scores_of_other_documents_are_not_computed() -> None:
    """Every segment is one document, or several that are short together; masks are small."""
    assert document_lengths(documents()) == list(LENGTHS)
    mask = make_document_mask(spec_of())
    assert isinstance(mask, DocumentMask)
    segments = [[segment.length for segment in row] for row in mask.rows]
    assert segments == [[200, 40, 60], [300], [3, 70, 63, 30, 100, 34]]
    for row in mask.rows:
        for segment in row:
            if segment.mask_11ss is not None:
                assert segment.length <= MERGED_LENGTH
                assert segment.mask_11ss.shape == (1, 1, segment.length, segment.length)
    dense = make_mask(spec_of())
    assert dense is not None and torch.equal(mask.dense(), dense)


def test_a_single_document_needs_no_mask() -> None:
    ids = torch.tensor([[0] * 8, [2] * 8])
    assert make_document_mask(MaskSpec(length=8, document_ids_bs=ids, device=CPU)) is None
    window = MaskSpec(length=8, window=2, document_ids_bs=ids, device=CPU)
    found, expected = make_document_mask(window), make_mask(window)
    assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
    assert torch.equal(found.expand_as(expected), expected)


def test_dropped_weights_are_random_within_documents() -> None:
    """With values of one, an output is the sum of the weights that are kept over 1 - p, and its mean is one."""
    q, k, v = heads(4, 4, 16)
    mask, outs = make_document_mask(spec_of()), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(
            attention_by_document(
                padded_attention, q, k, torch.ones_like(v), mask_bnst=mask, causal=True, dropout=0.25
            )
        )
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert abs(outs[0].mean().item() - 1) < 0.02


def cpu_ops(backend: str) -> Ops:
    return choose_ops(OpsConfig(ops_backend=backend), work=1.0, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--group-query-attention --num-query-groups 2 --position-embedding-type rope",
        "--position-embedding-type alibi",
        "--recompute-granularity selective",
    ],
)
def test_a_model_computes_the_same_as_with_dense_masks(flags: str) -> None:
    config = config_of(
        f"--hidden-dropout 0 --attention-dropout 0 --max-position-embeddings 300 {flags}"
    ).model
    tokens = torch.randint(60, (3, 300), generator=torch.Generator().manual_seed(3))
    results = []
    for backend in ("plain", "auto"):
        ops = cpu_ops(backend)
        assert (ops.make_mask is make_mask) == (backend == "plain")
        model = GPTModel(config, ModelContext(vocab_size=60, padded_vocab_size=64, ops=ops))
        buffer = flat(model)
        buffer.initialize(1)
        losses = model(tokens, position_ids(0, 3, 300, CPU), labels_bs=tokens, document_ids_bs=documents())
        losses.mean().backward()
        results.append((losses.detach(), buffer.grads.clone()))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
