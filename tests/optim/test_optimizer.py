"""Flat parameter memory and its optimizer against torch's on separate tensors."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from models import flat, position_ids

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.ops import linear, linear_cross_entropy
from megatron.ops.backend import PLAIN, Ops
from megatron.ops.compiler import eager
from megatron.optim.buffer import ParamBuffer
from megatron.optim.config import OptimizerConfig
from megatron.optim.layout import ALIGNMENT
from megatron.optim.norms import flat_norm
from megatron.optim.optimizer import Optimizer
from megatron.parallel.config import ParallelConfig
from megatron.recipes.config import LossScaleConfig
from megatron.recipes.loss_scale import LossScaler

CPU = torch.device("cpu")


def make(
    dtype: torch.dtype = torch.float32,
    parallel: ParallelConfig | None = None,
    ops: Ops = PLAIN,
    optimizer: OptimizerConfig | None = None,
) -> tuple[GPTModel, ParamBuffer]:
    config = ModelConfig(
        num_layers=2,
        hidden_size=36,
        num_attention_heads=3,
        max_position_embeddings=16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = GPTModel(config, ModelContext(vocab_size=50, padded_vocab_size=64, ops=ops))
    buffer = flat(model, dtype, config=parallel, optimizer=optimizer)
    buffer.initialize(3)
    return model, buffer


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(step))
    return model(tokens, position_ids(0, 2, 16, CPU), labels_bs=tokens.roll(-1, 1)).mean()


def test_parameters_and_gradients_are_views() -> None:
    model, buffer = make()
    entries = {entry.name: (entry, bucket) for bucket in buffer.buckets for entry in bucket.flat_params}
    for name, p in model.named_parameters():
        entry, bucket = entries[name]
        assert p.data_ptr() == buffer.params[entry.start :].data_ptr()
        assert p.grad.data_ptr() == buffer.grads[entry.start :].data_ptr()
        assert entry.start % ALIGNMENT == 0
        assert bucket.group.decays == (p.dim() >= 2)
    padding = 14 * 36
    assert buffer.local_elements == sum(p.numel() for p in model.parameters())
    assert buffer.num_elements == buffer.local_elements - padding
    loss_of(model, 0).backward()
    model.decoder.layers["0"].mlp.linear_fc1.weight.data.fill_(2.0)
    assert (entries["decoder.layers.0.mlp.linear_fc1.weight"][0].view(buffer.params) == 2.0).all()
    assert buffer.grads.norm() > 0


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_equals_torch_on_separate_tensors(kind: str, clip: float) -> None:
    config = OptimizerConfig(
        optimizer=kind,
        lr=1.0,
        adam_beta2=0.95,
        adam_eps=1e-4,
        sgd_momentum=0.8,
        clip_grad=clip,
        log_num_zeros_in_grad=True,
    )
    model, buffer = make(optimizer=config)
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.data, p.grad = p.data.clone(), None
    groups = [
        {"params": [p for p in other.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in other.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if kind == "adam":
        theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4, foreach=False)
    else:
        theirs = torch.optim.SGD(groups, lr=1e-2, momentum=0.8, foreach=False)
    ours = Optimizer(buffer, config)
    for step in range(5):
        loss_of(model, step).backward()
        loss_of(other, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), clip or 1e9)
        padding = 14 * 36
        zeros = sum(int((p.grad == 0).sum()) for p in model.parameters()) - padding
        stats = ours.step(lr=1e-2, weight_decay=0.1)
        theirs.step()
        theirs.zero_grad()
        assert stats["grad norm"].item() == pytest.approx(norm.item(), rel=1e-5)
        assert stats["num zeros"].item() == zeros
    for name, p in other.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-4, atol=1e-5, msg=name)
    assert ours.steps == 5
    assert not buffer.grads.any()


@pytest.mark.parametrize("kind", ["adam", "sgd", "lion", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_changes_nothing(kind: str, dtype: torch.dtype, value: float) -> None:
    config = OptimizerConfig(optimizer=kind, lr=1.0, on_non_finite="skip")
    model, buffer = make(dtype, optimizer=config)
    optimizer = Optimizer(buffer, config)
    loss_of(model, 0).backward()
    optimizer.step(lr=1e-2, weight_decay=0.1)
    state = [buffer.params, *buffer.masters, *(x for pieces in optimizer.state.values() for x in pieces)]
    before = [x.clone() for x in state]
    loss_of(model, 1).backward()
    buffer.grads[5] = value
    norm = optimizer.step(lr=1e-2, weight_decay=0.1)["grad norm"]
    assert not norm.isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
    assert optimizer.steps == 1
    loss_of(model, 2).backward()
    optimizer.step(lr=1e-2, weight_decay=0.1)
    assert all(master.isfinite().all() for master in buffer.masters)
    assert not torch.equal(before[1], buffer.masters[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [1, 16])
def test_layers_accumulate_weight_gradients(chunks: int, dtype: torch.dtype) -> None:
    """Gradients match autograd's, which sums those of embeddings in another order; full buckets are reduced."""
    added = []

    def accumulate_wgrad(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        added.append(total.shape)
        linear.accumulate_wgrad(total, a, b)

    loss = linear_cross_entropy.LinearCrossEntropy(
        run=eager,
        matmul=linear.matmul,
        accumulate_wgrad=accumulate_wgrad,
        chunk_bytes=32 // chunks * 64 * dtype.itemsize,
    )
    ops = dataclasses.replace(PLAIN, accumulate_wgrad=accumulate_wgrad, linear_cross_entropy=loss)
    parallel = ParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=5000)
    model, buffer = make(dtype, parallel, ops)
    other, by_autograd = make(dtype, ops=ops)
    for p in other.parameters():
        p.main_grad = None
    for step in range(2):
        if step == 1:
            buffer.reducer.begin_last_backward(0)
        loss_of(model, step).backward()
        loss_of(other, step).backward()
    for entry, theirs in zip(buffer.flat_params, by_autograd.flat_params, strict=True):
        ours = entry.view(buffer.grads)
        # The tables add each token's row to the sum of all microbatches; autograd first sums those of one.
        is_table = "embedding" in entry.name
        tolerance = 4 * torch.finfo(dtype).eps * ours.abs().max().item() if is_table else 0
        torch.testing.assert_close(ours, theirs.view(by_autograd.grads), rtol=0, atol=tolerance)
    # Linear layers of both transformer layers, and each chunk of the tied output layer.
    assert len(added) == 2 * (2 * 4 + chunks)
    assert len(buffer.reducer.reducing) == len(buffer.buckets) > 2


def test_bf16_keeps_fp32_master_weights_and_gradients() -> None:
    model, buffer = make(torch.bfloat16)
    assert buffer.masters[0].dtype == buffer.grads.dtype == torch.float32
    torch.testing.assert_close(buffer.params, torch.cat(buffer.masters).bfloat16(), rtol=0, atol=0)
    for step in range(3):
        loss_of(model, step).backward()
    assert all(p.grad is None for p in model.parameters())
    single = copy.deepcopy(buffer.grads)
    buffer.grads.zero_()
    sums = torch.zeros_like(single)
    for step in range(3):
        loss_of(model, step).backward()
        sums += buffer.grads
        buffer.grads.zero_()
    torch.testing.assert_close(single, sums)
    buffer.grads.copy_(single)
    # Updates below the resolution of bf16 accumulate in the master weights.
    optimizer = Optimizer(buffer, OptimizerConfig(lr=1.0))
    before = torch.cat(buffer.masters)
    optimizer.step(lr=1e-6, weight_decay=0.0)
    assert not torch.equal(before, torch.cat(buffer.masters))
    torch.testing.assert_close(buffer.params, torch.cat(buffer.masters).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_fp16_steps_match_fp32_on_the_unscaled_gradient(clip: float) -> None:
    stats, masters = [], []
    for dtype, scale in ((torch.float32, 1.0), (torch.float16, 2.0**20)):
        _, buffer = make(dtype)
        noise = torch.randn(len(buffer.grads), generator=torch.Generator().manual_seed(0))
        rules = [LossScaler(LossScaleConfig(initial_loss_scale=scale), CPU)] if scale > 1 else []
        optimizer = Optimizer(buffer, OptimizerConfig(lr=1.0, clip_grad=clip), rules)
        for step in range(3):
            assert optimizer.loss_scale == scale
            buffer.grads.copy_(noise * scale * 10.0**-step)
            stats.append(optimizer.step(lr=1e-2, weight_decay=0.1)["grad norm"])
        masters.append(torch.cat(buffer.masters))
    torch.testing.assert_close(stats[3:], stats[:3])
    torch.testing.assert_close(masters[1], masters[0], rtol=1e-5, atol=1e-6)


def test_initial_values() -> None:
    """GPT-2's initialization: N(0, 0.02²), scaled by 1/√(2 layers) for layers that write to the residual stream."""
    model, _ = make()
    again, _ = make()
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
        if name.endswith("bias"):
            assert not p.any()
        elif "layernorm" in name:
            assert (p == 1).all()
        else:
            std = 0.02 / 2 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.1), name
            assert abs(p.mean().item()) < 4 * std / p.numel() ** 0.5
    weights = [p.flatten()[:100] for p in model.parameters() if p.dim() >= 2]
    for i, a in enumerate(weights):
        for b in weights[:i]:
            assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1].item()) < 0.4


def test_norm_of_a_long_tensor() -> None:
    flat = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    for values in (flat, flat.pow(3), torch.full_like(flat, 0.1)):
        assert flat_norm(values).item() == pytest.approx(values.double().norm().item(), rel=1e-6)
    assert flat_norm(flat[:5]).item() == pytest.approx(flat[:5].double().norm().item(), rel=1e-6)
    flat[7] = float("nan")
    assert flat_norm(flat).isnan()
