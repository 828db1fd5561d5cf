"""Flat parameter memory: the start of communication, and the waits for it."""

from __future__ import annotations

import pytest
import torch
from models import CPU, flat, position_ids
from torch import Tensor

from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.save import take_snapshot
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.optim import grad_reducer
from megatron.optim.buffer import ParamBuffer
from megatron.optim.config import OptimizerConfig
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import Pending
from megatron.parallel.config import ParallelConfig

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    max_position_embeddings=8,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)


def make(
    dtype: torch.dtype = torch.float32, bucket_size: int = 1, **parallel: object
) -> tuple[GPTModel, ParamBuffer]:
    """Build a model and its buffer, by default with one bucket per parameter."""
    model = GPTModel(CONFIG, ModelContext(vocab_size=50, padded_vocab_size=64))
    buffer = flat(model, dtype, config=ParallelConfig(ddp_bucket_size=bucket_size, **parallel))
    buffer.initialize(3)
    return model, buffer


def loss_of(model: GPTModel, step: int) -> Tensor:
    tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(step))
    return model(tokens, position_ids(0, 2, 8, CPU), labels_bs=tokens.roll(-1, 1)).mean()


class Gather(Pending):
    """A pending all-gather of a bucket; the parameters are NaN until `wait`."""

    def __init__(self, params: Tensor) -> None:
        super().__init__(params)
        self.values = params.clone()
        params.fill_(torch.nan)

    def wait(self) -> Tensor:
        return self.result.copy_(self.values)


def start_gathers(buffer: ParamBuffer) -> None:
    for index, bucket in enumerate(buffer.buckets):
        buffer.gather.pending[index] = [Gather(buffer.params[bucket.start : bucket.end])]


def test_forward_waits_for_all_parameters_of_a_module() -> None:
    model, buffer = make(use_distributed_optimizer=True, overlap_param_gather=True)
    expected = loss_of(model, 0)
    start_gathers(buffer)
    assert buffer.params.isnan().all()
    assert torch.equal(loss_of(model, 0), expected)
    assert not buffer.gather.pending


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_waits_for_all_parameters_without_overlap(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, buffer = make(use_distributed_optimizer=True, overlap_param_gather=overlap)
    monkeypatch.setattr(buffer.gather, "start", lambda index: None)
    start_gathers(buffer)
    buffer.sync_params()
    assert bool(buffer.gather.pending) == overlap


def test_a_snapshot_waits_for_all_parameters() -> None:
    _, buffer = make()
    expected = buffer.params.clone()
    start_gathers(buffer)
    snapshot = take_snapshot(CheckpointConfig(), {}, buffer, Optimizer(buffer, OptimizerConfig(lr=1.0)))
    assert torch.equal(buffer.params, expected)
    assert all(x.isfinite().all() for x in snapshot.tensors["model"][""])


@pytest.mark.parametrize(
    ("overlap", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.bfloat16)]
)
def test_each_step_reduces_final_gradients(
    overlap: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two microbatches, only the last backward reduces: per bucket with overlap, else after backward."""
    model, buffer = make(dtype, bucket_size=700, overlap_grad_reduce=overlap)
    buckets = len(buffer.buckets)
    assert 1 < buckets < len(buffer.flat_params)
    reduced = []

    def start(grads: Tensor, axis: object) -> Pending:
        reduced.append((grads, grads.clone()))
        return Pending(grads)

    monkeypatch.setattr(grad_reducer, "start_all_reduce", start)
    for step in range(3):
        buffer.grads.zero_()
        loss_of(model, 2 * step).backward()
        assert not reduced
        buffer.reducer.begin_last_backward(0)
        loss_of(model, 2 * step + 1).backward()
        assert len(reduced) == (buckets if overlap else 0)
        buffer.reducer.finish()
        assert len(reduced) == buckets
        assert all(torch.equal(now, then) for now, then in reduced)
        reduced.clear()
