"""Twenty steps under context parallelism: losses, gradients and weights are those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of
from twenty_steps import assert_same_steps, train_engine

from megatron.data.gpt_dataset import GPTBatch
from megatron.parallel.mesh import Mesh, init_mesh

SAMPLES, LENGTH = 4, 32
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
    "dropout": f"{MODEL} --attention-dropout 0.1",
    "mixture": f"{MODEL} --init-method-std 0.1 --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1",
}
MODELS["capacity"] = f"{MODELS['mixture']} --moe-expert-capacity-factor 0.75"
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
    "C2 selective all-to-all": ("dense", 2, f"{C2} --cp-comm-type a2a --recompute-granularity selective"),
    "C2 offloaded all-to-all": ("dense", 2, f"{C2} --cp-comm-type a2a --cpu-offload-activations"),
    "C2D2+ZeRO2": ("dense", 4, f"{C2} {SHARDED} optim_grads"),
    "C4+ZeRO3": ("dense", 4, f"{C4} {SHARDED} optim_grads_params"),
    "C2P2 zb-h1": ("dense", 4, f"{C2} {PP} --pipeline-schedule zb-h1"),
    "C2P2 zb-v": ("dense", 4, f"{C2} {PP} {CHUNKS} --pipeline-schedule zb-v"),
    "C2E2 with a capacity": ("capacity", 2, f"{C2} --expert-model-parallel-size 2"),
    "T2C2+SP with a capacity": ("capacity", 4, f"{TP} {C2} --sequence-parallel"),
    "C2E2": ("mixture", 2, f"{C2} --expert-model-parallel-size 2"),
    "C2D2E4 all-gather": (
        "mixture",
        4,
        f"{C2} --expert-model-parallel-size 4 --cp-comm-type all_gather {ZERO}",
    ),
}


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
        return train_engine(engine_of(mesh, config), mesh, batches, SAMPLES)


@functools.cache
def one_process(model: str) -> dict[str, Any]:
    """The same of one process."""
    mesh = Mesh(device=CPU)
    return train_engine(engine_of(mesh, config_of(MODELS[model])), mesh, batches, SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("communication", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("backend", ["plain", "layers"])
def test_operations_without_dropout_by_position(communication: str, backend: str) -> None:
    """They have it under context parallelism, where attention drops what it does on a CPU by default."""
    flags = f"{C2} --cp-comm-type {communication} --ops-backend {backend}"
    ranks = run_distributed(train, 2, f"{MODELS['dropout']} {flags}")
    assert_same_steps(ranks, one_process("dropout"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_are_those_of_one_process(layout: str) -> None:
    model, processes, flags = LAYOUTS[layout]
    reference = one_process(model)
    ranks = run_distributed(train, processes, f"{MODELS[model]} {flags}")
    assert_same_steps(ranks, reference)
