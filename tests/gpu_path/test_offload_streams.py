"""Copies between host and device are ordered with what computes, on stand-ins for CUDA's streams and events."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gpu_path.recorded_step import VOCABULARY, build, recorded_mesh, train
from gpu_path.timeline import RecordAccesses
from models import CPU
from training.test_layouts import CHUNKS, FLAGS, LLAMA

from megatron.arguments import parse_run_config
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.save import take_snapshot
from megatron.ops import host_memory
from megatron.ops.host_memory import PASSED, CopyQueue
from megatron.optim import offload
from megatron.optim.offload import Offloaded, Slot
from megatron.performance import activation_offload
from megatron.performance.activation_offload import HostCopies, Pass, offload_activations
from megatron.planner.dry_run import longest_batch
from megatron.pretrain_gpt import GPT

Patch = pytest.MonkeyPatch
COPY = CopyQueue.copy


def races(flags: str, *, processes: int = 1) -> list[str]:
    """Races in three steps, each followed by a read of all state as a checkpoint needs it."""
    words = f"{FLAGS} --num-layers 3 {flags}".split()
    config = parse_run_config(words, description="", defaults={})
    with pytest.MonkeyPatch.context() as patch, recorded_mesh(config, 0, processes) as (mesh, record):
        patch.setattr(host_memory, "has_streams", lambda device: True)
        patch.setattr(offload, "PIECE_SIZE", 4096)
        patch.setattr(activation_offload, "MIN_BYTES", 256)
        engine = build(config, GPT, mesh)
        offload_activations(config, engine.model, CPU)
        engine.buffer.initialize(1)
        batch = longest_batch(config, GPT, VOCABULARY)
        with RecordAccesses(record.timeline):
            for step in range(3):
                train(engine, batch, 2, step)
                snapshot = take_snapshot(CheckpointConfig(), {}, engine.buffer, engine.optimizer)
                for part in snapshot.tensors["optimizer"].values():
                    for x in part:
                        x.clone()
    return record.timeline.races


OPTIMIZER, STRATEGY = "--bf16 --cpu-offload-optimizer", "--data-parallel-sharding-strategy"

ACTIVATIONS = "--bf16 --cpu-offload-activations --num-layers 4"


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        (OPTIMIZER, 1),
        (ACTIVATIONS, 1),
        pytest.param(f"{ACTIVATIONS} --cpu-offload-optimizer", 1, marks=pytest.mark.slow),
        pytest.param(f"{ACTIVATIONS} {LLAMA}", 1, marks=pytest.mark.slow),
        pytest.param(f"{ACTIVATIONS} {STRATEGY} optim_grads_params", 2, marks=pytest.mark.slow),
        *(
            pytest.param(
                f"{ACTIVATIONS} --pipeline-model-parallel-size 2 {schedule}", 2, marks=pytest.mark.slow
            )
            for schedule in (
                "",
                "--pipeline-schedule zb-h1",
                f"{CHUNKS} 1",
                f"{CHUNKS} 1 --pipeline-schedule zb-v",
            )
        ),
        pytest.param("--cpu-offload-optimizer", 1, marks=pytest.mark.slow),
        *(
            pytest.param(
                f"{OPTIMIZER} {STRATEGY} {strategy} {overlap}",
                2,
                marks=pytest.mark.slow,
            )
            for strategy in ("optim", "optim_grads", "optim_grads_params")
            for overlap in ("", "--overlap-param-gather --overlap-grad-reduce")
        ),
    ],
)
def test_copies_are_ordered(flags: str, processes: int) -> None:
    assert races(flags, processes=processes) == []


def copies_are_not_awaited(patch: Patch) -> None:
    def copy(self: CopyQueue, *arguments: object) -> object:
        COPY(self, *arguments)
        return PASSED

    patch.setattr(CopyQueue, "copy", copy)


def copies_wait_for_nothing(patch: Patch) -> None:
    patch.setattr(CopyQueue, "copy", lambda self, pairs, after: COPY(self, pairs, []))


def slots_are_free_at_once(patch: Patch) -> None:
    patch.setattr(Slot, "free", property(lambda self: PASSED, lambda self, event: None), raising=False)


def a_save_reads_at_once(patch: Patch) -> None:
    patch.setattr(Offloaded, "finish", lambda self: None)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (copies_are_not_awaited, "_fused_adamw_ on main stream is not ordered after copy_ on stream 1"),
        (copies_wait_for_nothing, "copy_ on stream 2 is not ordered after _fused_adamw_ on main stream"),
        (slots_are_free_at_once, "copy_ on stream 1 is not ordered after copy_ on stream 2"),
        (a_save_reads_at_once, "clone on main stream is not ordered after copy_ on stream 2"),
    ],
)
def test_a_fault_in_the_optimizer_is_found(
    monkeypatch: Patch, fault: Callable[[Patch], None], message: str
) -> None:
    fault(monkeypatch)
    found = races(OPTIMIZER)
    assert any(message in race for race in found), found[:5]


def activations_are_not_awaited(patch: Patch) -> None:
    def wait(self: HostCopies, wanted: Pass) -> None:
        self.come(wanted)
        wanted.activations = {}

    patch.setattr(HostCopies, "wait", wait)


def activations_are_freed_at_once(patch: Patch) -> None:
    free = HostCopies.free_after_copy

    def without_waiting(self: HostCopies, left: Pass) -> None:
        if left.is_leaving:
            left.ready = PASSED
        free(self, left)

    patch.setattr(HostCopies, "free_after_copy", without_waiting)


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        (activations_are_not_awaited, ("on main stream is not ordered after copy_ on stream 2",)),
        (activations_are_freed_at_once, ("memory is freed before copy_ on stream 1 has ended",)),
        (
            copies_wait_for_nothing,
            (
                "copy_ on stream 1 is not ordered after add on main stream",
                "copy_ on stream 2 is not ordered after copy_ on stream 1",
            ),
        ),
    ],
)
def test_a_fault_in_activations_is_found(
    monkeypatch: Patch, fault: Callable[[Patch], None], messages: tuple[str, ...]
) -> None:
    fault(monkeypatch)
    found = races(ACTIVATIONS)
    for message in messages:
        assert any(message in race for race in found), sorted(set(found))[:9]
