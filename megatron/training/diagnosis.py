"""Where a gradient that is not finite comes from: the step is computed again, and everything in it looked at."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.data.loader import Batch
from megatron.parallel.collectives import gather_texts
from megatron.training.engine import Engine


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """A value that is not finite. In order: those that came about earlier in the step are less."""

    microbatch: int
    stage: int  # of all, chunks counted too; in a backward pass negative, so that the last is the least
    call: int  # of the modules, or gradients, of that stage
    rank: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} (rank {self.rank}, microbatch {self.microbatch})"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was found when a step was computed again, the same on every process.

    Attributes:
        output: the first output of a module that was not, or the loss.
        gradient: the first gradient of a parameter that was not, before it is summed over replicas.
        grad_norm: of the whole gradient.
    """

    output: Finding | None
    gradient: Finding | None
    grad_norm: float

    @property
    def repeats(self) -> bool:
        """Whether the step was not finite again."""
        return not math.isfinite(self.grad_norm)

    def __str__(self) -> str:
        """What to tell of a step that is not finite again."""
        if self.output:
            return f"first {self.output}"
        if self.gradient:
            return f"all outputs are finite, and the first gradient that is not is that of {self.gradient}"
        return "each replica's gradient is finite, and their sum is not"


def diagnose(
    engine: Engine, batches: Iterator[Batch], *, num_microbatches: int, consumed_samples: int
) -> Diagnosis:
    """Compute the gradients of a step again and say what in it is not finite first. No weights are changed.

    Every process must take part.
    """
    engine.graph = None  # which would run no hooks
    for p in (p for chunk in engine.chunks for p in chunk.parameters()):
        p.gradient_sum = None  # so that gradients pass through autograd, which runs them
    probe = _Probe(engine)
    with probe.attached():
        engine.compute_gradients(
            batches, num_microbatches=num_microbatches, consumed_samples=consumed_samples
        )
    grad_norm = engine.buffer.norm(engine.optimizer.grads).item()
    engine.buffer.grads.zero_()
    told = [json.loads(text) for text in gather_texts(json.dumps(probe.found), engine.mesh.world)]
    first: dict[str, Finding | None] = dict.fromkeys(("output", "gradient"))
    for kind in first:
        first[kind] = min((Finding(*found[kind]) for found in told if kind in found), default=None)
    return Diagnosis(**first, grad_norm=grad_norm)


def spoiled_weights(engine: Engine) -> str:
    """The first parameters that are not finite, of each rank that has any; "" if none has. Every process must take
    part."""
    found = next((e.name for e in engine.buffer.entries if not _finite(e.view(engine.buffer.params))), "")
    told = gather_texts(found, engine.mesh.world)
    return ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(told) if name)


def _finite(x: Tensor) -> bool:
    """Whether all of `x` is finite. Takes no memory, which may be scarce."""
    return x.numel() == 0 or all(end.isfinite() for end in torch.aminmax(x))


class _Probe:
    """Looks at what passes through the chunks of this process, and notes what is not finite first."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.mesh = engine, engine.mesh
        self.found: dict[str, tuple] = {}  # the fields of a `Finding`, by its kind
        self.microbatch, self.call = -1, 0

    def note(self, kind: str, stage: int, call: int, what: str) -> None:
        """Keep a finding, if it is the first of its kind."""
        finding = (self.microbatch, stage, call, self.mesh.world.rank, what)
        self.found[kind] = min(self.found.get(kind, finding), finding)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Look at all that is computed within the block."""
        handles = []
        for number, (chunk, part) in enumerate(zip(self.engine.chunks, self.engine.parts, strict=True)):
            stage = number * self.mesh.pp.size + self.mesh.pp.rank
            handles.append(chunk.register_forward_pre_hook(self._begin_forward([0])))
            for path, module in chunk.named_modules():
                what = (
                    f"the output of {path}"
                    if path
                    else "the loss"
                    if part.last
                    else f"the output of stage {stage}"
                )
                handles.append(module.register_forward_hook(functools.partial(self._output, stage, what)))
            for name, p in chunk.named_parameters():
                handles.append(p.register_hook(functools.partial(self._gradient, stage, p.tied or name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin_forward(self, count: list[int]) -> Any:
        def begin(*_: Any) -> None:
            self._begin(count[0])
            count[0] += 1

        return begin

    def _begin(self, microbatch: int) -> None:
        self.microbatch, self.call = microbatch, 0

    def _output(self, stage: int, what: str, module: nn.Module, _: Any, out: Any) -> None:
        self.call += 1
        tensors = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
        if not all(_finite(x) for x in tensors):
            self.note("output", stage, self.call, what)
        if module in self.engine.chunks and tensors[0].requires_grad:
            # A backward pass through this chunk begins here.
            microbatch = self.microbatch
            tensors[0].register_hook(lambda _: self._begin(microbatch))

    def _gradient(self, stage: int, name: str, grad: Tensor) -> None:
        self.call += 1
        if not _finite(grad):
            self.note("gradient", -stage, self.call, name)
