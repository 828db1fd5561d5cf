"""Operations of a training step on a GPU, recorded without one.

A dry run executes the step on fake tensors with the operations that PyTorch chooses on a GPU. Operations of one layer
are the difference between models of two depths.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron.plugins  # noqa: F401 (registers what a run has)
from megatron.planner import dry_run
from megatron.planner.counting import Counter, tensors_of
from megatron.training.config import RunConfig
from megatron.training.task import Task

# Operations that launch no kernel: views, empty memory, and queries.
NO_KERNEL = set(
    """
    _reshape_alias _unsafe_view alias as_strided chunk detach device empty empty_like empty_strided expand lift_fresh
    narrow new_empty permute reshape select slice split split_with_sizes squeeze t transpose unbind unfold unsqueeze
    view view_as
    """.split()
)
MATMUL = set("_scaled_mm accumulate_wgrad addmm addmm_ baddbmm bmm linear mm".split())
ATTENTION = "_scaled_dot_product_"
PASSES = {"forward-compute": "forward", "backward-compute": "backward"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a pass.

    Attributes:
        direction: "forward", "backward", or "" outside of both.
        name: that of torch, or "compiled NAME" for a function that torch.compile makes one kernel of.
        bytes: of the tensors that it reads and writes.
        outputs: shape and dtype of each tensor that it makes.
    """

    direction: str
    name: str
    bytes: int
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def kind(self) -> str:
        """ "matmul", "attention", or "other": work bound by memory bandwidth."""
        if self.name in MATMUL:
            return "matmul"
        return "attention" if self.name.startswith(ATTENTION) else "other"


class Recorder(Counter):
    """Counter of a dry run that also records the operations of each pass.

    Attributes:
        runs: operations of each `Recorder` made so far.
    """

    runs: list[list[Operation]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.direction = ""
        self.operations: list[Operation] = []
        self.runs.append(self.operations)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if self.holding and func.namespace not in ("prim", "c10d") and name not in NO_KERNEL:
            self.record(name, [*args, *(kwargs or {}).values()], out)
        return out

    def fused(self, function: Callable[..., Any], *arguments: Any) -> Any:
        out = super().fused(function, *arguments)
        self.record(f"compiled {function.__name__.strip('_')}", list(arguments), out)
        return out

    def record(self, name: str, read: list[Any], written: Any) -> None:
        outputs = tensors_of([written])
        size = sum(_bytes(x) for x in [*tensors_of(read), *outputs])
        made = tuple((tuple(x.shape), x.dtype) for x in outputs)
        self.operations.append(Operation(self.direction, name, size, made))


def _bytes(x: Tensor) -> int:
    """Bytes of the distinct elements of a tensor: an expanded dimension is read once."""
    return (
        x.element_size()
        * torch.Size(n for n, step in zip(x.shape, x.stride(), strict=True) if step != 0).numel()
    )


class Phases(dry_run.PhaseRecorder):
    """Tells the recorder which pass runs."""

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        return self._directed(phase)

    @contextmanager
    def _directed(self, phase: str) -> Iterator[None]:
        assert isinstance(self.counter, Recorder)
        before = self.counter.direction
        self.counter.direction = PASSES.get(phase, before)
        with super().__call__(phase):
            yield
        self.counter.direction = before


def trace(config: RunConfig, task: Task, *, rank: int = 0, processes: int = 1) -> list[Operation]:
    """Operations of the passes of one rank's step, in order."""
    Recorder.runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "Counter", Recorder)
        patch.setattr(dry_run, "PhaseRecorder", Phases)
        dry_run.DryRun.from_config(config, task, processes).count(rank)
    (operations,) = Recorder.runs
    return [operation for operation in operations if operation.direction]


def per_layer(shallow: list[Operation], deep: list[Operation]) -> list[Operation]:
    """Operations that `deep`, a model with one layer more, has besides those of `shallow`."""
    left = collections.Counter(deep)
    left.subtract(collections.Counter(shallow))
    assert all(count >= 0 for count in left.values()), "the models differ in more than a layer"
    return sorted(left.elements(), key=lambda operation: (operation.direction, operation.name))
