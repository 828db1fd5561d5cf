"""A training step of one rank with process groups that communicate nothing, and record what they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_path.timeline import Clock, RecordAccesses, Timeline, replace_cuda
from models import CPU
from torch import Tensor
from torch.distributed.distributed_c10d import Backend

from megatron.data.batch import Batch
from megatron.ops.backend import choose_ops
from megatron.ops.compiler import eager
from megatron.parallel.mesh import Mesh
from megatron.parallel.phases import Phases
from megatron.planner.dry_run import longest_batch
from megatron.planner.fakes import fake_mesh
from megatron.training.build import build_model
from megatron.training.config import RunConfig
from megatron.training.engine import DTYPES, Engine
from megatron.training.task import Task

VOCABULARY, PADDED = 251, 256


@dataclasses.dataclass(frozen=True)
class Call:
    """A communication that a rank asks a group for.

    Attributes:
        group: its global ranks, and its number among the groups of these ranks.
        kind: "send", "receive", or the name of a collective.
        elements: of the whole tensor.
        peer: the other rank of a transfer; that which owns a broadcast or a reduction; else None.
    """

    group: tuple[tuple[int, ...], int]
    kind: str
    elements: int
    dtype: torch.dtype
    peer: int | None = None


@dataclasses.dataclass(frozen=True)
class Wait:
    """The current stream waits for call number `call`."""

    call: int


@dataclasses.dataclass
class Record:
    """Communications of one rank, in order, and the timeline of its memory."""

    events: list[Call | Wait] = dataclasses.field(default_factory=list)
    calls: int = 0
    timeline: Timeline = dataclasses.field(default_factory=Timeline)
    groups: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)

    @property
    def communications(self) -> list[Call]:
        return [event for event in self.events if isinstance(event, Call)]


class RecordedWork(dist.Work):
    """A communication under way. Like torch's with NCCL, it keeps its tensors until a stream has waited for it."""

    def __init__(self, record: Record, number: int, clock: Clock[str], tensors: list[Tensor]) -> None:
        super().__init__()
        self.record, self.number, self.clock, self.tensors = record, number, clock, tensors

    def wait(self, *_: Any) -> bool:
        timeline = self.record.timeline
        self.record.events.append(Wait(self.number))
        timeline.order(timeline.stream, self.clock)
        self.tensors = []
        return True

    def is_completed(self) -> bool:
        return False


class RecordedGroup(dist.ProcessGroup):
    """A process group that records its calls."""

    def __init__(self, record: Record, name: str, rank: int, ranks: tuple[int, ...]) -> None:
        super().__init__(rank, len(ranks))
        self.name = name
        number = record.groups[ranks] = record.groups.get(ranks, -1) + 1
        self.record, self.key = record, (ranks, number)

    @property
    def group_name(self) -> str:
        return self.name

    def _call(
        self, kind: str, reads: list[Tensor], writes: list[Tensor], peer: int | None = None
    ) -> RecordedWork:
        record, whole = self.record, max([*reads, *writes], key=Tensor.numel)
        ranks, number = self.key
        call = Call(self.key, kind, whole.numel(), whole.dtype, None if peer is None else ranks[peer])
        record.events.append(call)
        record.calls += 1
        actor = f"communicator {number} of ranks {ranks}"
        clock = record.timeline.communicate(actor, reads, writes, kind)
        return RecordedWork(record, record.calls - 1, clock, [*reads, *writes])

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> RecordedWork:
        kind = "all-reduce maximum" if options.reduceOp == dist.ReduceOp.MAX else "all-reduce"
        return self._call(kind, tensors, tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> RecordedWork:
        return self._call("broadcast", tensors, tensors, options.rootRank)

    def reduce(self, tensors: list[Tensor], options: Any) -> RecordedWork:
        return self._call("reduce", tensors, tensors, options.rootRank)

    def all_gather_single(self, out: Tensor, x: Tensor, options: Any = None) -> RecordedWork:
        return self._call("all-gather", [x], [out])

    def reduce_scatter_single(self, out: Tensor, x: Tensor, options: Any = None) -> RecordedWork:
        return self._call("reduce-scatter", [x], [out])

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # before torch 2.13

    def alltoall_base(
        self, out: Tensor, x: Tensor, received: list[int], sent: list[int], options: Any = None
    ) -> RecordedWork:
        return self._call("all-to-all", [x], [out])

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> RecordedWork:
        return self._call("send", tensors, [], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> RecordedWork:
        return self._call("receive", [], tensors, peer)


@contextmanager
def recorded_mesh(config: RunConfig, rank: int, processes: int) -> Iterator[tuple[Mesh, Record]]:
    """Mesh of one process of a run whose groups record. Streams and events of torch.cuda record too."""
    record = Record()

    def make_group(options: Any, _: Any) -> RecordedGroup:
        ranks = tuple(options.global_ranks_in_group or range(processes))
        return RecordedGroup(record, options.group_id, options.group_rank, ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Backend._plugins, "FAKE", Backend._BackendPlugin(make_group, True))
        replace_cuda(patch, record.timeline)
        with fake_mesh(config.parallel, CPU, rank=rank, processes=processes) as mesh:
            yield mesh, record


def build(config: RunConfig, task: Task, mesh: Mesh) -> Engine:
    """An engine with the operations of a GPU, not compiled, on tensors of a CPU."""
    ops = choose_ops(
        config.ops,
        work=1e12,
        dtype=DTYPES[config.training.precision],
        device=torch.device("cuda"),
        find=lambda _: (eager, ""),
        has_fused_wgrad=lambda *_: False,
    )
    model = build_model(config, task, mesh, ops, vocab_size=VOCABULARY, padded_vocab_size=PADDED)
    return Engine(config, task, mesh, model, Phases())


def record_steps(
    config: RunConfig, task: Task, *, rank: int = 0, processes: int = 1, steps: int = 1
) -> Record:
    """Record training steps of one rank. Values are those of one rank alone, and the record does not depend on them."""
    with recorded_mesh(config, rank, processes) as (mesh, record):
        engine = build(config, task, mesh)
        engine.buffer.initialize(1)
        batch = longest_batch(config, task, VOCABULARY)
        microbatches = config.training.global_batch_size // (config.training.micro_batch_size * mesh.dp.size)
        record.events.clear()
        record.calls = 0
        with RecordAccesses(record.timeline):
            for step in range(steps):
                train(engine, batch, microbatches, step)
            engine.buffer.gather.finish()
    return record


def train(engine: Engine, batch: Batch, microbatches: int, step: int) -> None:
    """One training step on copies of a batch."""
    engine.train_step(
        iter([batch] * microbatches),
        num_microbatches=microbatches,
        consumed_samples=step,
        lr=1e-4,
        weight_decay=0.1,
    )
