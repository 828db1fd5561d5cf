"""No memory is reused or freed before its last reader is ordered, on stand-ins for CUDA's streams and events."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_path.recorded_step import VOCABULARY, build, record_steps, recorded_mesh, train
from gpu_path.timeline import HOST, RecordAccesses, Stream, Timeline, replace_cuda
from models import CPU
from torch import Tensor
from training.test_layouts import CONTEXT_LAYOUTS, DENSE_LAYOUTS, FLAGS, LAYOUTS, MIXTURES

from megatron.arguments import parse_run_config
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.save import Snapshot, take_snapshot
from megatron.data.batch import Batch
from megatron.data.loader import _batches
from megatron.optim.param_gather import ParamGather
from megatron.parallel.collectives import Pending
from megatron.parallel.mesh import Axis
from megatron.parallel.transfers import Transfers
from megatron.performance import async_save
from megatron.performance.async_save import AsyncSaver, HostCopy
from megatron.performance.cuda_graph import WARM_UP, GraphedPass
from megatron.planner.dry_run import longest_batch
from megatron.planner.fakes import BALANCED
from megatron.pretrain_gpt import GPT
from megatron.training import engine as engine_module
from megatron.training.config import RunConfig
from megatron.training.engine import Engine

Patch = pytest.MonkeyPatch


def config_of(layout: str) -> tuple[int, RunConfig]:
    processes, flags = LAYOUTS[layout]
    # The flags of some layouts divide four layers only.
    of_four = any(
        name in layout for name in ("layout", "P2 zb-v", "D2 zb-v", "P2 v-min", "dualpipe-v", "auto V")
    )
    layers = 4 if of_four or layout in ("T2D2+ZeRO", "T2", "P2") else 8
    shape = ""
    if layout not in DENSE_LAYOUTS | CONTEXT_LAYOUTS:
        shape = f"{MIXTURES['capacity' if 'padded' in layout else 'mixture']} --moe-layer-freq 1"
    words = f"{FLAGS} {shape} --num-layers {layers} {flags}".split()
    return processes, parse_run_config(words, description="", defaults={})


def races(layout: str, rank: int = 0) -> list[str]:
    """Races in two training steps of a rank."""
    processes, config = config_of(layout)
    with Patch.context() as patch:
        for (module, name), function in BALANCED.items():  # ranks exchange no values to route by
            patch.setattr(module, name, function)
        return record_steps(config, GPT, rank=rank, processes=processes, steps=2).timeline.races


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("T2D2+ZeRO", 0),
        ("P2", 1),
        *(
            pytest.param(layout, rank, marks=pytest.mark.slow)
            for layout, (processes, _) in LAYOUTS.items()
            for rank in (0, processes - 1)
            # The experts that a gather would bring decide what is padded.
            if processes > 1 and layout != "E2 padded all-gather"
        ),
    ],
)
def test_a_step_orders_its_memory(layout: str, rank: int) -> None:
    assert races(layout, rank) == []


def without_waiting(patch: Patch, what: str) -> None:
    """Use the result of a communication at once."""
    wait = Pending.wait
    patch.setattr(Pending, "wait", lambda self: self.result if self.what == what else wait(self))


def gathers_are_not_awaited(patch: Patch) -> None:
    patch.setattr(ParamGather, "wait", lambda self, index: None)
    # A step first waits for the sum of the denominators, a later communication of the same group.
    patch.setattr(engine_module, "all_reduce_sum", lambda x, *axes: x)


def one_receive_buffer(patch: Patch) -> None:
    """All receives use the same memory."""
    buffers: dict[tuple[int, ...], Tensor] = {}
    empty = torch.empty

    def reused(shape: Any, **arguments: Any) -> Tensor:
        return buffers.setdefault(tuple(shape), empty(shape, **arguments)).detach()

    receive = Transfers.receive

    def posted(*arguments: Any) -> Callable[[], Tensor]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch, "empty", reused)
            return receive(*arguments)

    patch.setattr(Transfers, "receive", posted)


def sent_memory_is_reused(patch: Patch) -> None:
    send = Transfers.send

    def overwrite(self: Transfers, x: Tensor, peer: int) -> None:
        send(self, x, peer)
        x.zero_()

    patch.setattr(Transfers, "send", overwrite)


def sends_are_forgotten(patch: Patch) -> None:
    """Nothing keeps what is being sent."""
    send = Transfers.send

    def forget(self: Transfers, x: Tensor, peer: int) -> None:
        send(self, x, peer)
        self.sending.clear()

    patch.setattr(Transfers, "send", forget)


@pytest.mark.parametrize(
    ("fault", "layout", "message"),
    [
        (
            functools.partial(without_waiting, what="reduce-scatter"),
            "T2D2+ZeRO",
            "after reduce-scatter on comm",
        ),
        pytest.param(
            functools.partial(without_waiting, what="all-reduce"),
            "T2",
            "after all-reduce on communicator",
            marks=pytest.mark.slow,
        ),
        (gathers_are_not_awaited, "T2D2+ZeRO", "after all-gather on communicator"),
        (functools.partial(without_waiting, what="receive"), "P2", "after receive on communicator"),
        (one_receive_buffer, "P2", "after receive on communicator"),
        (sent_memory_is_reused, "P2", "zero_ on main stream is not ordered after send"),
        (sends_are_forgotten, "P2", "memory is freed before send"),
    ],
)
def test_a_fault_in_a_step_is_found(monkeypatch: Patch, fault: Callable, layout: str, message: str) -> None:
    fault(monkeypatch)
    found = races(layout, rank=LAYOUTS[layout][0] - 1 if "receive" in message else 0)
    assert any(message in race for race in found), found[:3]


def load(pin: Callable[[Tensor], Tensor]) -> list[str]:
    """Races of reading batches into pinned memory and copying them to a device, here the meta device."""
    timeline = Timeline()
    dataset = [Batch(tokens=torch.zeros(2, 8)) for _ in range(3)]
    mesh = types.SimpleNamespace(device=torch.device("meta"), cp=Axis())
    with pytest.MonkeyPatch.context() as patch, RecordAccesses(timeline, lambda x: x.device.type == "cpu"):
        patch.setattr(Tensor, "pin_memory", pin)
        batches = _batches(iter(dataset), dataset, True)
        for batch in Engine._to_device(types.SimpleNamespace(mesh=mesh), batches):
            batch.tokens.add(1)
    return timeline.races


def test_pinned_batches() -> None:
    assert load(lambda x: x.clone()) == []
    memory = torch.zeros(2, 8)
    assert "copy_ on host is not ordered after _to_copy on main stream" in load(lambda x: memory.copy_(x))


class Thread:
    """Stand-in for a thread: it runs when it starts, and nothing orders the host after it until it is joined."""

    def __init__(self, timeline: Timeline, target: Callable[..., None], args: tuple, daemon: bool) -> None:
        self.timeline, self.target, self.args = timeline, target, args

    def start(self) -> None:
        timeline = self.timeline
        timeline.order("writer", timeline.clocks[HOST])
        timeline.host = "writer"
        self.target(*self.args)
        timeline.host = HOST

    def join(self) -> None:
        self.timeline.order(HOST, self.timeline.clocks["writer"])


def save(patch: Patch) -> list[str]:
    """Races of three steps, each followed by a save in the background."""
    processes, config = config_of("T2D2+ZeRO")
    with recorded_mesh(config, 0, processes) as (mesh, record):
        timeline = record.timeline

        def write(_: object, snapshot: Snapshot, world: object) -> None:
            timeline.act("writer", tensors(snapshot), [], "writing")

        patch.setattr(AsyncSaver, "write", write)
        patch.setattr(async_save.threading, "Thread", functools.partial(Thread, timeline))
        engine = build(config, GPT, mesh)
        engine.buffer.initialize(1)
        saver = AsyncSaver(CheckpointConfig(save="unused"), engine.buffer, engine.optimizer, {}, log=print)
        snapshot = take_snapshot(saver.config, {}, engine.buffer, engine.optimizer)
        saver.copy, saver.world = HostCopy(snapshot, torch.device("cuda")), mesh.world
        batch = longest_batch(config, GPT, VOCABULARY)
        with RecordAccesses(timeline):
            for step in range(3):
                train(engine, batch, 2, step)
                saver.save({"iteration": step})
    return timeline.races


def tensors(snapshot: Snapshot) -> list[Tensor]:
    return [x for group in snapshot.tensors.values() for parts in group.values() for x in parts]


def reads_without_waiting(patch: Patch) -> None:
    patch.setattr(Timeline, "synchronize", lambda self: None)


def saves_while_the_thread_writes(patch: Patch) -> None:
    patch.setattr(AsyncSaver, "wait", lambda self: None)


def copies_on_another_stream(patch: Patch) -> None:
    take = HostCopy.take

    def on_side(self: HostCopy, snapshot: Snapshot) -> Snapshot:
        with torch.cuda.stream(torch.cuda.Stream()):
            return take(self, snapshot)

    patch.setattr(HostCopy, "take", on_side)


def test_asynchronous_saves(monkeypatch: Patch) -> None:
    assert save(monkeypatch) == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (reads_without_waiting, "writing on writer is not ordered after copy_ on main stream"),
        (saves_while_the_thread_writes, "copy_ on main stream is not ordered after writing on writer"),
        (copies_on_another_stream, "copy_ on stream 1 is not ordered after"),
    ],
)
def test_a_fault_in_a_save_is_found(monkeypatch: Patch, fault: Callable[[Patch], None], message: str) -> None:
    fault(monkeypatch)
    assert any(message in race for race in save(monkeypatch))


def warm_up() -> list[str]:
    """Races of a graphed pass before its capture, which runs on a stream of its own."""
    timeline = Timeline()
    with pytest.MonkeyPatch.context() as patch:
        replace_cuda(patch, timeline)
        total = torch.zeros(2)
        graphed = GraphedPass(lambda batch, step: total.add_(batch.tokens) * step["factor"], CPU)
        with RecordAccesses(timeline):
            for _ in range(WARM_UP):
                graphed(Batch(tokens=torch.ones(2)), {"factor": torch.ones(1)})
    return timeline.races


def test_graphed_passes(monkeypatch: Patch) -> None:
    assert warm_up() == []
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None)
    assert "add_ on stream 1 is not ordered after copy_ on main stream" in warm_up()


def test_events_order_streams(monkeypatch: Patch) -> None:
    timeline = Timeline()
    replace_cuda(monkeypatch, timeline)
    side, event, x = torch.cuda.Stream(), torch.cuda.Event(), torch.zeros(4)
    with RecordAccesses(timeline):
        with torch.cuda.stream(side):
            x.add_(1)
            side.record_event(event)
            x[:2].add_(1)
        event.wait()
        x[2:].add_(1)
        assert timeline.races == []
        event.synchronize()
        assert event.query()
        x.add_(1)
    assert set(timeline.races) == {"add_ on main stream is not ordered after add_ on stream 1"}
