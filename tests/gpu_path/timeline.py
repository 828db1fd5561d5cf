"""Order of accesses to memory by the host, its streams and its communicators: a race detector for one process.

Actors are host threads, CUDA streams and communicators, which NCCL runs on streams of their own. Work of one actor
runs in order; work of two is ordered only by events: a stream begins a kernel after the host launched it, a
communication begins after what its caller's stream has been given, a stream that waits for a communication continues
after it, and the host continues after what it synchronizes with. Each actor has a vector clock (Mattern 1988). Two
accesses to the same bytes, of which one writes, must be ordered; memory may be freed only after all of its accesses.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu_path.layer_trace import NO_KERNEL
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.planner.counting import tensors_of

HOST, MAIN = "host", "main stream"
Clock = collections.Counter


@dataclasses.dataclass(frozen=True)
class Access:
    """An access to the bytes from `begin` to `end` of a storage, at `time` of an actor's clock."""

    begin: int
    end: int
    actor: str
    time: int
    writes: bool
    what: str


class Timeline:
    """Clocks of the actors, and the accesses that later ones must be ordered after.

    Attributes:
        stream: name of the current stream.
        host: name of the current host thread.
        races: a line for each pair of accesses that nothing orders.
    """

    def __init__(self) -> None:
        self.clocks: dict[str, Clock[str]] = collections.defaultdict(Clock)
        self.stream, self.host = MAIN, HOST
        self.races: list[str] = []
        self.accesses: dict[int, list[Access]] = {}
        self.alive: dict[int, weakref.ref] = {}

    def order(self, later: str, clock: Clock[str]) -> None:
        """Order the next work of `later` after everything that `clock` has seen."""
        self.clocks[later] |= clock

    def act(self, actor: str, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> Clock[str]:
        """Run work on an actor, after what the host and the actor did so far. Returns the clock at its end."""
        clock = self.clocks[actor]
        clock |= self.clocks[self.host]
        clock[actor] += 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._access(tensor, actor, is_write, what)
        return Clock(clock)

    def launch(self, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> None:
        """Run a kernel on the current stream."""
        self.act(self.stream, reads, writes, what)

    def communicate(
        self, actor: str, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str
    ) -> Clock[str]:
        """Run a communication after the work that the current stream has been given."""
        self.order(actor, self.clocks[self.stream])
        return self.act(actor, reads, writes, what)

    def synchronize(self) -> None:
        """Let the host wait for all streams and communicators."""
        for clock in list(self.clocks.values()):
            self.order(self.host, clock)

    def _access(self, tensor: Tensor, actor: str, writes: bool, what: str) -> None:
        begin, end = _span(tensor)
        if begin == end:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = weakref.ref(storage, lambda _: self._free(key))
            self.accesses[key] = []
        clock, kept = self.clocks[actor], []
        for old in self.accesses[key]:
            is_ordered = clock[old.actor] >= old.time
            if begin < old.end and old.begin < end and (writes or old.writes) and not is_ordered:
                self.races.append(f"{what} on {actor} is not ordered after {old.what} on {old.actor}")
            covered = begin <= old.begin and old.end <= end and is_ordered
            if not (covered and (writes or not old.writes)):
                kept.append(old)
        self.accesses[key] = [*kept, Access(begin, end, actor, clock[actor], writes, what)]

    def _free(self, key: int) -> None:
        """Memory goes back to the allocator, which gives it to the current stream or to the host."""
        del self.alive[key]
        clock = self.clocks[self.stream] | self.clocks[self.host]
        for old in self.accesses.pop(key):
            if clock[old.actor] < old.time:
                self.races.append(f"memory is freed before {old.what} on {old.actor} has ended")


def _span(x: Tensor) -> tuple[int, int]:
    """First and last byte of a tensor in its storage; the same twice if it is empty."""
    if x.numel() == 0:
        return 0, 0
    begin = x.storage_offset()
    end = begin + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    return begin * x.element_size(), end * x.element_size()


class RecordAccesses(TorchDispatchMode):
    """Run every operation of torch as a kernel on the current stream of a timeline.

    Where `is_host` is true of all of its tensors, the current host thread runs it at once.
    """

    def __init__(self, timeline: Timeline, is_host: Callable[[Tensor], bool] = lambda x: False) -> None:
        super().__init__()
        self.timeline, self.is_host = timeline, is_host

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace == "prim" or name in NO_KERNEL:
            return out
        given = tensors_of([*args, *kwargs.values()])
        written = [
            x
            for argument, value in [
                *zip(func._schema.arguments, args, strict=False),
                *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs),
            ]
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in tensors_of([value])
        ]
        known = {x.untyped_storage()._cdata for x in given}
        made = [x for x in tensors_of([out]) if x.untyped_storage()._cdata not in known]
        actor = self.timeline.stream
        if name == "host_zeros" or all(self.is_host(x) for x in [*given, *made]):
            actor = self.timeline.host
        self.timeline.act(actor, given, [*written, *made], name)
        return out


class Event:
    """Stand-in for torch.cuda.Event."""

    def __init__(self, timeline: Timeline, **_: Any) -> None:
        self.timeline, self.clock = timeline, Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Clock(self.timeline.clocks[self.timeline.stream if stream is None else stream.name])

    def wait(self, stream: Stream | None = None) -> None:
        self.timeline.order(self.timeline.stream if stream is None else stream.name, self.clock)

    def synchronize(self) -> None:
        self.timeline.order(self.timeline.host, self.clock)

    def query(self) -> bool:
        return all(self.timeline.clocks[self.timeline.host][actor] >= t for actor, t in self.clock.items())


class Stream:
    """Stand-in for torch.cuda.Stream."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline, self.name = timeline, name

    def wait_stream(self, other: Stream) -> None:
        self.timeline.order(self.name, self.timeline.clocks[other.name])

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def synchronize(self) -> None:
        self.timeline.order(self.timeline.host, self.timeline.clocks[self.name])

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.timeline)
        event.record(self)
        return event


def replace_cuda(patch: Any, timeline: Timeline) -> None:
    """Replace streams and events of torch.cuda by stand-ins on a timeline."""
    count = iter(range(1, 1000))

    @contextmanager
    def run_on(stream: Stream) -> Iterator[None]:
        before, timeline.stream = timeline.stream, stream.name
        try:
            yield
        finally:
            timeline.stream = before

    for name, value in {
        "Stream": lambda *_, **__: Stream(timeline, f"stream {next(count)}"),
        "Event": lambda *_, **arguments: Event(timeline, **arguments),
        "stream": run_on,
        "current_stream": lambda *_: Stream(timeline, timeline.stream),
        "synchronize": lambda *_: timeline.synchronize(),
    }.items():
        patch.setattr(torch.cuda, name, value)
