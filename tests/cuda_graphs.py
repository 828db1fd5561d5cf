"""Stand-ins for CUDA graphs and streams that work on a CPU: a graph replays captured operations on the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    """Captured operations, each with the tensors that it reads and writes."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.replays = 0

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, kept in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(kept), tree_leaves(again), strict=True):
                # Views and in-place results already share the memory.
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Capture(TorchDispatchMode):
    """Captures the operations of a block and then restores memory, since a real capture computes nothing."""

    def __init__(self, graph: Graph, *, stream: Stream, capture_error_mode: str) -> None:
        super().__init__()
        assert capture_error_mode == "thread_local"
        self.graph, self.stream = graph, stream
        self.changed: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            written = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.changed += [(x.detach(), x.detach().clone()) for x in written]
        out = function(*args, **kwargs)
        self.graph.calls.append((function, args, kwargs, out))
        return out

    def __enter__(self) -> Capture:
        Stream.log.append(f"capture on {self.stream.name}")
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for x, before in reversed(self.changed):
            x.copy_(before)


class Stream:
    """Records which stream waits for which."""

    log: list[str] = []  # noqa: RUF012 (shared by all)

    def __init__(self, device: torch.device | None = None, name: str = "side") -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    Stream.log.append(f"run on {stream.name}")
    yield


# Attributes of torch.cuda, with what replaces them.
CUDA_GRAPHS: dict[str, Any] = {
    "CUDAGraph": Graph,
    "graph": Capture,
    "Stream": Stream,
    "stream": on,
    "current_stream": lambda: Stream(name="main"),
}
