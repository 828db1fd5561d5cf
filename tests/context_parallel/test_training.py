"""Twenty steps under context parallelism: losses, gradients and weights are those of one process."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of
from torch import Tensor

from megatron.data.gpt_dataset import GPTBatch
from megatron.optim.layout import FlatParam
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.training.engine import Engine
from megatron.verify.assemble import local_index
from megatron.verify.capture import parameter_place

STEPS, SAMPLES, LENGTH = 20, 4, 32
# Every second layer has a window. Eight heads share four groups, which two by two ranks or four can exchange.
# The first step of Adam divides a gradient by its absolute value: --adam-eps keeps rounding from choosing the sign of
# the step where a gradient is nearly 0.
MODEL = f"""
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --num-attention-heads 8 --kv-channels 8 --group-query-attention
    --num-query-groups 4 --window-size 7,0 --window-attn-skip-freq 2 --seq-length {LENGTH} --micro-batch-size 1
    --global-batch-size {SAMPLES} --attention-dropout 0 --hidden-dropout 0 --adam-eps 1e-6
    --distributed-timeout-minutes 2
"""
MODELS = {
    "dense": MODEL,
    "mixture": f"{MODEL} --init-method-std 0.1 --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1",
}
C2, C4 = "--context-parallel-size 2", "--context-parallel-size 4"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SHARDED = "--data-parallel-sharding-strategy"
CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"
COMMUNICATIONS = {"p2p": "p2p", "all-gather": "all_gather", "all-to-all": "a2a"}
OF_EACH = {
    "C2": (2, C2),
    "C4": (4, C4),
    "C2 recomputed": (2, f"{C2} --recompute-granularity full"),
    "C2D2+ZeRO": (4, f"{C2} {ZERO}"),
    "T2C2": (4, f"{TP} {C2}"),
    "T2C2+SP": (4, f"{TP} {C2} --sequence-parallel"),
    "C2P2": (4, f"{C2} {PP}"),
    "C2P2V2": (4, f"{C2} {PP} {CHUNKS}"),
}
# Model, processes and flags.
LAYOUTS = {
    f"{layout} {name}": ("dense", processes, f"{flags} --cp-comm-type {value}")
    for layout, (processes, flags) in OF_EACH.items()
    for name, value in COMMUNICATIONS.items()
} | {
    "C4 two levels": (
        "dense",
        4,
        f"{C4} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    ),
    "C2D2+ZeRO2": ("dense", 4, f"{C2} {SHARDED} optim_grads"),
    "C4+ZeRO3": ("dense", 4, f"{C4} {SHARDED} optim_grads_params"),
    "C2P2 zb-h1": ("dense", 4, f"{C2} {PP} --pipeline-schedule zb-h1"),
    "C2P2 zb-v": ("dense", 4, f"{C2} {PP} {CHUNKS} --pipeline-schedule zb-v"),
    "C2E2": ("mixture", 2, f"{C2} --expert-model-parallel-size 2"),
    "C2D2E4 all-gather": (
        "mixture",
        4,
        f"{C2} --expert-model-parallel-size 4 --cp-comm-type all_gather {ZERO}",
    ),
}

# Parts of tensors: name of the parameter, indices in the flat whole tensor, and values.
Parts = list[tuple[str, np.ndarray, np.ndarray]]


def batches(step: int) -> list[GPTBatch]:
    """The samples of a global batch, one a microbatch; every second batch has documents.

    The loss of the second sample counts no position of the first of two ranks, or of the first two of four, and that
    of the third none of the others.
    """
    generator = torch.Generator().manual_seed(step)
    random = functools.partial(torch.rand, generator=generator)
    outer = torch.arange(LENGTH).sub(LENGTH // 2).add(0.5).abs() > LENGTH // 4
    masks = [torch.ones(LENGTH), (~outer).float(), outer.float(), (random(LENGTH) < 0.5).float()]
    found = []
    for mask in masks:
        text = torch.randint(60, (1, LENGTH + 1), generator=generator)
        starts = random(1, LENGTH) < 0.15
        positions = torch.arange(LENGTH).unsqueeze(0)
        if documents := step % 2 == 1:
            positions = positions - torch.where(starts, positions, 0).cummax(1).values
        batch = GPTBatch(
            tokens=text[:, :-1].contiguous(),
            labels=text[:, 1:].contiguous(),
            loss_mask=mask.unsqueeze(0),
            position_ids=positions,
            document_ids=starts.cumsum(1) if documents else None,
        )
        found.append(batch)
    return found


def train(flags: str) -> dict[str, Any]:
    """Train a rank. Returns its share of the losses, and its parts of the gradients of each step and of the weights."""
    config = config_of(flags)
    with init_mesh(config.parallel, CPU) as mesh:
        return train_engine(engine_of(mesh, config), mesh)


def train_engine(engine: Engine, mesh: Mesh) -> dict[str, Any]:
    losses, grads = [], []
    for step in range(STEPS):
        mine = batches(step)[mesh.dp.rank :: mesh.dp.size]
        batch = engine.next_global_batch(iter(mine), len(mine), step * SAMPLES)
        share = engine.forward_backward(batch)
        engine.reduce_gradients()
        losses.append(share.sum().double().item() / mesh.tp.size)
        grads.append([part_of(*part) for part in engine.buffer.parts(engine.optimizer.grads)])
        engine.optimizer.step(share, lr=2e-3, weight_decay=0.1)
    engine.buffer.gather.finish()
    weights = [part_of(*part) for part in engine.buffer.held_params()]
    return {"losses": np.array(losses), "gradients": grads, "weights": weights}


def part_of(param: FlatParam, values: Tensor, begin: int) -> tuple[str, np.ndarray, np.ndarray]:
    index, valid = local_index(parameter_place(param.shard_spec, (begin, begin + values.numel())))
    return param.name, index[valid].numpy(), values.detach()[valid].numpy()  # a copy


@functools.cache
def one_process(model: str) -> dict[str, Any]:
    """The same of one process."""
    mesh = Mesh(device=CPU)
    return train_engine(engine_of(mesh, config_of(MODELS[model])), mesh)


def assert_equal(ranks: list[Parts], reference: Parts, tolerance: float) -> None:
    """The parts of all ranks are those of the whole tensors, relative to the norms of these, and leave nothing out."""
    whole = {name: values for name, _, values in reference}
    missing = {name: np.ones(len(values), dtype=bool) for name, values in whole.items()}
    for name, index, values in (part for parts in ranks for part in parts):
        difference = np.linalg.norm(values - whole[name][index]) / np.linalg.norm(whole[name])
        assert difference < tolerance, f"{name}: {difference}"
        missing[name][index] = False
    assert not any(left.any() for left in missing.values())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_are_those_of_one_process(layout: str) -> None:
    model, processes, flags = LAYOUTS[layout]
    reference = one_process(model)
    ranks = run_distributed(train, processes, f"{MODELS[model]} {flags}")
    losses = sum(rank["losses"] for rank in ranks)
    np.testing.assert_allclose(losses, reference["losses"], rtol=1e-5)
    for step, grads in enumerate(reference["gradients"]):
        assert_equal([rank["gradients"][step] for rank in ranks], grads, 1e-4 if step else 1e-5)
    assert_equal([rank["weights"] for rank in ranks], reference["weights"], 1e-4)
