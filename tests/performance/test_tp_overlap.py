"""Tensor-parallel communication that overlaps with products gives the results of communication that does not."""

from __future__ import annotations

import os
import types
from typing import Any

import pytest
import torch
from distributed import free_port, run_distributed
from gpu_path import recorded_step
from gpu_path.order import Streams, disagreements
from gpu_path.recorded_step import Call, Wait, recorded_mesh
from models import CPU, config_of, engine_of
from performance.test_compiled_layer import random_batches

from megatron.errors import InputError
from megatron.model.layers import RowParallelLinear
from megatron.parallel.mesh import init_mesh
from megatron.performance import tp_overlap
from megatron.performance.tp_overlap import (
    PIECES,
    TPCommOverlap,
    gathered_product,
    overlap,
    pieces,
    scattered_product,
    summed_product,
)
from megatron.pretrain_gpt import GPT
from megatron.training.engine import Engine

TP, SP = "--tensor-model-parallel-size 2", "--sequence-parallel"
# A rank's part of the sequence, 9 positions, is no multiple of the number of pieces.
SHAPE = "--seq-length 18 --max-position-embeddings 18 --attention-dropout 0 --hidden-dropout 0"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
PLAIN = "--ops-backend plain"
OVERLAP = "--tp-comm-overlap"


def train(flags: str) -> tuple[list[float], float]:
    """Losses of two steps, and the norm of the last gradient."""
    config = config_of(f"{SHAPE} {flags}")
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        with TPCommOverlap().during_run(types.SimpleNamespace(config=config, engine=engine)):
            rows = [layer for layer in engine.modules[0].modules() if isinstance(layer, RowParallelLinear)]
            assert all(("forward" in vars(layer)) == (OVERLAP in flags) for layer in rows)
            losses = []
            for step in range(2):
                batches = iter(random_batches(config, torch.Generator().manual_seed(step)))
                loss, stats = engine.train_step(
                    batches, num_microbatches=2, consumed_samples=4 * step, lr=1e-3, weight_decay=0.1
                )
                losses.append(loss.item())
            return losses, stats["grad norm"].item()


def train_all(runs: list[str], ports: list[int]) -> list[tuple[list[float], float]]:
    results = []
    for flags, port in zip(runs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        results.append(train(flags))
    return results


def assert_same(processes: int, flags: list[str]) -> None:
    """Each run is the same with and without overlap, on the rank that has the loss."""
    runs = [f"{more} {overlap}" for more in flags for overlap in ("", OVERLAP)]
    found = run_distributed(train_all, processes, runs, [free_port() for _ in runs])[-1]
    for (losses, norm), (overlapped, overlapped_norm) in zip(found[::2], found[1::2], strict=True):
        assert overlapped == pytest.approx(losses, rel=1e-6)
        assert overlapped_norm == pytest.approx(norm, rel=1e-5)


def test_training_is_the_same() -> None:
    assert_same(2, [f"{PLAIN} {TP} {LLAMA}", f"{PLAIN} {TP} {SP} --recompute-granularity full"])


@pytest.mark.slow
def test_training_is_the_same_with_compiled_layers() -> None:
    assert_same(2, [f"--ops-backend layers {TP}", f"--ops-backend layers {TP} {SP}"])


@pytest.mark.slow
def test_training_is_the_same_in_a_pipeline() -> None:
    pipeline = "--pipeline-model-parallel-size 2"
    assert_same(4, [f"{TP} {pipeline}", f"{TP} {SP} {pipeline}"])


def products() -> list[bool]:
    """Each product equals that of the whole tensors, for 7 positions of each rank."""
    config = config_of(TP)
    with init_mesh(config.parallel, CPU) as mesh:
        rank = mesh.tp.rank
        draw = torch.Generator().manual_seed(1)
        # Small whole numbers, whose sums are exact in any order.
        x, weight, bias = (
            torch.randint(-9, 9, shape, generator=draw).double() for shape in ((14, 3, 8), (10, 8), (10,))
        )
        half, own = slice(4 * rank, 4 * rank + 4), slice(7 * rank, 7 * rank + 7)
        y = x @ weight.t()
        part = x[..., half], weight[:, half], mesh.tp
        return [
            torch.equal(gathered_product(x[own], weight, bias, mesh.tp), y + bias),
            torch.equal(gathered_product(x[own], weight, None, mesh.tp), y),
            torch.equal(scattered_product(*part), y[own]),
            torch.equal(summed_product(*part), y),
        ]


def test_products() -> None:
    assert run_distributed(products, 2) == [[True] * 4] * 2
    assert pieces(9) == [(0, 2), (2, 4), (4, 6), (6, 9)] and pieces(2) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("product", [gathered_product, scattered_product, summed_product])
def test_a_piece_is_communicated_beside_the_product_of_another(product: object) -> None:
    """The host starts all communications before it waits for the second, and ranks agree on their order."""
    config, ranks = config_of(TP), []
    for rank in range(2):
        with recorded_mesh(config, rank, 2) as (mesh, record):
            x = torch.ones(16, 2, 8)
            more = (None, mesh.tp) if product is gathered_product else (mesh.tp,)
            product(x, torch.ones(6, 8), *more)
            ranks.append(record.events)
    kinds = [type(event) for event in ranks[0]]
    assert kinds == [Call] * PIECES + [Wait] * PIECES
    assert disagreements(ranks) == [] and Streams(ranks).run() == []


def record(flags: str) -> tuple[list[list[Call | Wait]], list[str]]:
    """Events of both ranks in a whole step, and races for memory of the first."""
    config, events, races = config_of(f"{SHAPE} {TP} {flags} --global-batch-size 4"), [], []
    with pytest.MonkeyPatch.context() as patch:
        build = recorded_step.build

        def overlapped(*arguments: Any) -> Engine:
            engine = build(*arguments)
            overlap(engine.modules)
            return engine

        patch.setattr(recorded_step, "build", overlapped)
        for rank in range(2):
            found = recorded_step.record_steps(config, GPT, rank=rank, processes=2)
            events.append(found.events)
            races.append(found.timeline.races)
    return events, races[0]


@pytest.mark.parametrize("flags", ["", SP])
def test_a_step_has_no_deadlock_and_no_race(flags: str) -> None:
    events, races = record(flags)
    assert disagreements(events) == [] and Streams(events).run() == [] and races == []


@pytest.mark.parametrize(
    ("flags", "start"), [("", "start_all_reduce"), (SP, "start_all_gather"), (SP, "start_reduce_scatter")]
)
def test_a_piece_that_is_not_awaited_is_found(
    flags: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(tp_overlap, start)

    def forgetful(*arguments: Any, **named: Any) -> Any:
        pending = original(*arguments, **named)
        return types.SimpleNamespace(wait=lambda: pending.result, started=pending)

    monkeypatch.setattr(tp_overlap, start, forgetful)
    assert record(flags)[1]


def test_the_flag_needs_tensor_parallelism() -> None:
    with pytest.raises(InputError, match=r"^--tp-comm-overlap needs --tensor-model-parallel-size above 1$"):
        config_of(OVERLAP)
