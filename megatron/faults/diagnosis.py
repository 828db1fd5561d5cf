"""Find the origin of a gradient that is not finite: recompute the step and check every output and gradient."""

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

from megatron.optim.norms import model_norm
from megatron.parallel.collectives import gather_texts
from megatron.parallel.parameters import main_grad, named_parameters
from megatron.parallel.schedules import part_of
from megatron.performance.compiled_layer import uncompiled
from megatron.training.engine import Engine, GlobalBatch


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """A value that is not finite. Findings compare by the time at which they were computed."""

    microbatch: int
    stage: int  # number of the model chunk; negative in backward, which visits the last one first
    call: int  # number of the module call, or gradient, in that chunk
    rank: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} (rank {self.rank}, microbatch {self.microbatch})"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Result of recomputing a step, the same on every process.

    Attributes:
        output: the first output of a module, or loss, that is not finite.
        gradient: the first gradient of a parameter that is not finite, before the sum over replicas.
        grad_norm: norm of the whole gradient.
    """

    output: Finding | None
    gradient: Finding | None
    grad_norm: float

    @property
    def repeats(self) -> bool:
        """True if the recomputed gradient is not finite either."""
        return not math.isfinite(self.grad_norm)

    def __str__(self) -> str:
        """Describe the origin, for the error message."""
        if self.output:
            return f"first {self.output}"
        if self.gradient:
            return f"all outputs are finite, and the first gradient that is not is that of {self.gradient}"
        return "each replica's gradient is finite, and their sum is not"


def diagnose(engine: Engine, batch: GlobalBatch) -> Diagnosis:
    """Recompute the gradients of a step and find the first value in it that is not finite.

    No weights are changed. Every process must call this.
    """
    probe = _Probe(engine)
    with probe.attached(), uncompiled(engine.ops):
        engine.forward_backward(batch, eager=True)
        engine.reduce_gradients()
    grad_norm = model_norm(engine.optimizer.grads, engine.buffer.buckets, engine.mesh).item()
    engine.buffer.grads.zero_()
    found = [json.loads(text) for text in gather_texts(json.dumps(probe.found), engine.mesh.world)]
    first = {
        kind: min((Finding(*rank[kind]) for rank in found if kind in rank), default=None)
        for kind in ("output", "gradient")
    }
    return Diagnosis(**first, grad_norm=grad_norm)


def corrupt_weights(engine: Engine) -> str:
    """Names the first parameter that is not finite on each rank that has one; "" if none has. Every process must call
    this."""
    found = next((param.name for param, x, _ in engine.buffer.held_params() if not _finite(x)), "")
    names = gather_texts(found, engine.mesh.world)
    return ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(names) if name)


def _finite(x: Tensor) -> bool:
    """True if all of `x` is finite. Allocates nothing, since memory may be scarce."""
    return x.numel() == 0 or all(end.isfinite() for end in torch.aminmax(x))


class _Probe:
    """Watches the outputs and gradients of this process's modules, and records the first that is not finite."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.mesh = engine, engine.mesh
        self.found: dict[str, tuple] = {}  # fields of a `Finding`, by kind
        self.microbatch, self.call = -1, 0

    def record(self, kind: str, stage: int, call: int, what: str) -> None:
        """Record a finding if it is the first of its kind."""
        finding = (self.microbatch, stage, call, self.mesh.world.rank, what)
        self.found[kind] = min(self.found.get(kind, finding), finding)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the hooks for the length of the block."""
        handles = []
        for number, (chunk, part) in enumerate(zip(self.engine.modules, self.engine.chunks, strict=True)):
            v_shaped = self.engine.config.parallel.v_shaped
            stage = part_of(self.mesh.pp.rank, number, self.mesh.pp.size, v_shaped)
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
            for name, p in named_parameters(chunk):
                check = functools.partial(self._gradient, stage, p.tied or name)
                handle = p.register_post_accumulate_grad_hook(check)
                handle.hooks_dict_ref().move_to_end(
                    handle.id, last=False
                )  # before sharded gradients are reduced
                handles.append(handle)
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
            self.record("output", stage, self.call, what)
        if module in self.engine.modules and tensors[0].requires_grad:
            # Backward through this chunk starts here.
            microbatch = self.microbatch
            tensors[0].register_hook(lambda _: self._begin(microbatch))

    def _gradient(self, stage: int, name: str, p: Tensor) -> None:
        self.call += 1
        # The sum over the microbatches so far, to which layers may add without autograd, and what autograd adds next.
        grads = [grad for grad in (main_grad(p), p.grad) if grad is not None]
        if not all(map(_finite, grads)):
            self.record("gradient", -stage, self.call, name)
