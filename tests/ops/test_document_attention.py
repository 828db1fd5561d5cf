"""Attention within documents by FlexAttention, against attention with a dense mask.

On a CPU it has no gradient unless its check of the device is left out, and then computes all scores.
"""

from __future__ import annotations

import pytest
import torch
from models import CPU, config_of, flat, position_ids
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from megatron.context_parallel.attention import ContextAttention
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.ops.attention import MaskSpec, attention, make_mask
from megatron.ops.backend import PLAIN, Ops, choose_ops
from megatron.ops.compiler import eager
from megatron.ops.config import OpsConfig
from megatron.ops.document_attention import attention_by_documents, dense_mask, make_block_mask
from megatron.parallel.mesh import ALONE

LENGTHS = (384, 300)  # three blocks, the last of which may not be full


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


def spec_of(ids: torch.Tensor, **fields: object) -> MaskSpec:
    return MaskSpec(length=ids.shape[1], document_ids_bs=ids, device=CPU, **fields)


def documents(length: int, seed: int) -> torch.Tensor:
    """Ids of three sequences: of one document, of many, and of one for each token."""
    ends = torch.rand(length, generator=torch.Generator().manual_seed(seed)) < 0.02
    return torch.stack((torch.zeros(length, dtype=torch.int64), ends.cumsum(0), torch.arange(length)))


def heads(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries of four heads, keys and values of two."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(3, n, length, 16, dtype=dtype, generator=generator, requires_grad=True) for n in (4, 2, 2)
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 10, 130, 300])
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_are_those_of_torch(length: int, window: int | None, causal: bool) -> None:
    """`create_block_mask` makes the same from the dense mask."""
    ours = make_block_mask(spec_of(documents(length, 1), window=window, causal=causal))
    theirs = flex_attention.create_block_mask(ours.mask_mod, 3, None, length, length, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_a_dense_mask(length: int) -> None:
    ids, inputs = documents(length, 2), heads(length, torch.float64)
    found = []
    for mask in (make_block_mask(spec_of(ids)), make_mask(spec_of(ids))):
        out = attention_by_documents(*inputs, mask_bnst=mask, causal=True, dropout=0.0)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_other_documents_need_no_other_code() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_by_documents, backend=counter, fullgraph=True)
    for seed in range(3):
        ids, inputs = documents(384, seed), heads(384, torch.float32)
        out = compiled(*inputs, mask_bnst=make_block_mask(spec_of(ids)), causal=True, dropout=0.0)
        out.sum().backward()
        expected = attention(*inputs, mask_bnst=make_mask(spec_of(ids)), causal=True, dropout=0.0)
        torch.testing.assert_close(out, expected)
    assert counter.frame_count == 1


def test_context_parallelism_compiles_it() -> None:
    """It calls attention between two graphs, after an exchange of heads."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda f, *arguments: f(*arguments), backend=counter, fullgraph=True)
    inner = Ops(
        run=compiled,
        communicate=torch.compiler.disable(eager),
        attention=attention_by_documents,
        make_mask=make_block_mask,
    )
    divided = ContextAttention(ALONE, ALONE, ALONE, gathers=False, inner=inner)
    for seed in range(2):
        ids, inputs = documents(384, seed), heads(384, torch.float32)
        mask = divided.make_mask(spec_of(ids))
        out = torch.compile(divided.attention, backend="eager")(
            *inputs, mask_bnst=mask, causal=True, dropout=0.0
        )
        out.sum().backward()
        expected = attention(*inputs, mask_bnst=make_mask(spec_of(ids)), causal=True, dropout=0.0)
        torch.testing.assert_close(out, expected)
    assert counter.frame_count == 1


def test_only_compiled_layers_of_a_gpu_use_it() -> None:
    def ops(device: str, backend: str):
        return choose_ops(
            OpsConfig(ops_backend=backend),
            work=1.0,
            dtype=torch.bfloat16,
            device=torch.device(device),
            find=lambda _: (eager, ""),
            has_fused_wgrad=lambda *_: False,
        )

    assert ops("cuda", "auto").make_mask is make_block_mask
    assert ops("cpu", "layers").make_mask is make_mask
    assert ops("cuda", "plain").make_mask is make_mask


@pytest.mark.parametrize(
    "flags",
    ["", "--group-query-attention --position-embedding-type rope", "--position-embedding-type alibi"],
)
def test_a_model_computes_the_same(flags: str) -> None:
    config = config_of(
        f"--hidden-dropout 0 --attention-dropout 0 --max-position-embeddings 300 {flags}"
    ).model
    tokens = torch.randint(60, (3, 300), generator=torch.Generator().manual_seed(3))
    results = []
    for ops in (PLAIN, Ops(attention=attention_by_documents, make_mask=make_block_mask)):
        model = GPTModel(config, ModelContext(vocab_size=60, padded_vocab_size=64, ops=ops))
        buffer = flat(model)
        buffer.initialize(1)
        losses = model(
            tokens, position_ids(0, 3, 300, CPU), labels_bs=tokens, document_ids_bs=documents(300, 4)
        )
        losses.mean().backward()
        results.append((losses.detach(), buffer.grads.clone()))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_a_dense_mask_of_a_window_without_documents() -> None:
    """gpt-oss needs one on GPUs, since its attention sinks take a dense mask."""
    spec = MaskSpec(length=300, document_ids_bs=None, window=10, device=CPU)
    mask = dense_mask(make_block_mask(spec))
    s, t = torch.arange(300).unsqueeze(1), torch.arange(300)
    assert torch.equal(mask, ((s >= t) & (s - t <= 10)).view(1, 1, 300, 300))


@pytest.mark.parametrize("fields", [{}, {"window": 10}, {"window": 130, "causal": False}], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_dense_mask(length: int, fields: dict[str, object]) -> None:
    """Dropout and ALiBi take one."""
    spec = spec_of(documents(length, 5), **fields)
    mask = make_mask(spec)
    assert torch.equal(dense_mask(make_block_mask(spec)), mask)
    s, t, ids = torch.arange(length).unsqueeze(1), torch.arange(length), spec.document_ids_bs
    near = (s - t).abs() <= (length if spec.window is None else spec.window)
    allowed = near & (s >= t if spec.causal else near) & (ids.unsqueeze(2) == ids.unsqueeze(1))
    assert torch.equal(mask.squeeze(1), allowed)


def test_attention_drops_weights() -> None:
    ids, inputs, found = documents(16, 6), heads(16, torch.float32), []
    for mask in (make_block_mask(spec_of(ids)), make_mask(spec_of(ids))):
        torch.manual_seed(1)
        found.append(attention_by_documents(*inputs, mask_bnst=mask, causal=True, dropout=0.5))
    assert torch.equal(*found)
