"""Capture the first steps of a run: --capture.

Hooks at the borders of all modules, the shard spec of each parameter and the axes of the mesh suffice. A new layer,
optimizer or schedule is captured without a change here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron import __version__
from megatron.data.batch import Batch
from megatron.optim.layout import FlatParam
from megatron.parallel.parameters import named_parameters
from megatron.parallel.random import DropoutKey
from megatron.parallel.slices import GlobalSlice
from megatron.training.engine import GlobalBatch
from megatron.training.loop import Hook, Trainer
from megatron.training.report import EvalResult
from megatron.training.stage import MeanLoss
from megatron.verify.config import CaptureConfig
from megatron.verify.format import CaptureWriter, Place, Record


class Capturing(Hook):
    """Write a capture of the first --capture-steps steps, if the run has --capture."""

    capture: RunCapture | None = None

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        config = trainer.config.plugin(CaptureConfig)
        if config.capture is None:
            yield
            return
        self.capture = RunCapture(trainer, config)
        try:
            yield
        finally:
            self.capture.writer.flush()

    def during_training(self, trainer: Trainer) -> AbstractContextManager[object]:
        return ExitStack() if self.capture is None else self.capture.attached()

    def before_training(self, trainer: Trainer) -> None:
        if self.capture is not None:
            self.capture.add_state()
            self.capture.writer.flush()

    def after_step(self, trainer: Trainer) -> None:
        if self.capture is not None and self.capture.active:
            self.capture.end_step()

    def after_collect(self, trainer: Trainer, rows: list[dict[str, float]]) -> None:
        for row in rows:
            if row["iteration"] == trainer.state.iteration:
                self.capture_row(row)

    def after_evaluation(self, trainer: Trainer, result: EvalResult) -> None:
        self.capture_row(result.values)

    def capture_row(self, row: dict[str, float]) -> None:
        """Add values as they are logged."""
        if self.capture is not None and self.capture.captures_last:
            for name, value in row.items():
                value64 = torch.tensor(float(value), dtype=torch.float64)
                self.capture.add_value("logged", name, value64, step=self.capture.step - 1)


class RunCapture:
    """Records of the steps of one rank.

    Attributes:
        first: the last step before the first captured one.
        microbatch: first sample of the microbatch that is in forward; None outside of forward.
    """

    def __init__(self, trainer: Trainer, config: CaptureConfig) -> None:
        mesh = trainer.mesh
        self.trainer, self.engine = trainer, trainer.engine
        self.first, self.steps = trainer.state.iteration, config.capture_steps
        axes = {"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp}
        run = {
            "program": f"megatron {__version__}",
            "torch": str(torch.__version__),
            "precision": trainer.config.training.precision,
            "micro_batch_size": trainer.config.training.micro_batch_size,
            "global_batch_size": trainer.batch_schedule.global_batch_size,
        }
        self.writer = CaptureWriter(
            Path(str(config.capture)),
            rank=mesh.world.rank,
            coordinates={name: axis.rank for name, axis in axes.items()},
            sizes={name: axis.size for name, axis in axes.items()},
            run=run,
            max_bytes=config.capture_megabytes * 10**6,
        )
        self.microbatch: int | None = None
        self.seq_length = 0
        self.order = 0
        self.calls: dict[tuple[str, str], int] = {}
        self.producers: dict[int, tuple[str, Tensor]] = {}
        self.readers: dict[str, set[str]] = {}
        self.running: list[str] = []
        self.before: list[Tensor] = []
        self.loss_scale = 1.0

    @property
    def step(self) -> int:
        """The step that runs."""
        return self.trainer.state.iteration + 1

    @property
    def active(self) -> bool:
        """True if the step that runs, or the one that has just ended, is captured."""
        return bool(self.before)

    @property
    def captures_last(self) -> bool:
        """True if the last step was captured."""
        return 0 < self.trainer.state.iteration - self.first <= self.steps

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which the engine's passes are captured."""
        engine = self.engine
        task, run_passes = engine.task, engine.run_passes
        handles = [handle for module in engine.modules for handle in self._hook(module)]
        engine.task = dataclasses.replace(task, forward=functools.partial(self._forward, task.forward))
        engine.run_passes = functools.partial(self._run_passes, run_passes)
        engine.phases.observers.append(self._observe)
        try:
            yield
        finally:
            engine.task, engine.run_passes = task, run_passes
            engine.phases.observers.remove(self._observe)
            for handle in handles:
                handle.remove()

    def _run_passes(self, inner: Any, batch: GlobalBatch, loss: MeanLoss) -> None:
        if self.step - self.first <= self.steps:
            self.writer.flush()
            self.before = [master.clone() for master in self.engine.buffer.masters]
            self.loss_scale = float(self.engine.optimizer.loss_scale)
            self.add_value("metric", "loss denominators", batch.denominators, step=self.step)
        inner(batch, loss)

    def _forward(
        self, inner: Any, module: nn.Module, batch: Batch, x: Tensor | None, dropout_key: DropoutKey
    ) -> Tensor:
        """Run a task's forward on a microbatch, and capture it. Evaluations have no dropout key."""
        if not self.active or dropout_key is None:
            return inner(module, batch, x, dropout_key)
        self.microbatch, self.seq_length = dropout_key[1], batch.seq_length
        self.order, self.calls = 0, {}
        try:
            with MaskRecorder(self):
                out = inner(module, batch, x, dropout_key)
            if out.ndim == 1:
                for name, value in zip(self.engine.task.loss_names, out, strict=True):
                    self._add("loss", name, value.float())
        finally:
            self.microbatch = None
            self.producers.clear()
        return out

    def _hook(self, chunk: nn.Module) -> Iterator[Any]:
        for name, module in chunk.named_modules():
            yield module.register_forward_pre_hook(functools.partial(self._before_module, name))
            yield module.register_forward_hook(functools.partial(self._after_module, name))

    def _before_module(self, name: str, module: nn.Module, inputs: tuple) -> None:
        if self.microbatch is None:
            return
        self.running.append(name)
        if inputs and isinstance(inputs[0], Tensor) and id(inputs[0]) in self.producers:
            self.readers.setdefault(self.producers[id(inputs[0])][0], set()).add(name)

    def _after_module(self, name: str, module: nn.Module, inputs: tuple, out: Any) -> None:
        if self.microbatch is None:
            return
        self.running.pop()
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return
        place = self._place(module, out)
        index = self._add("activation", name, out, place=place)
        self.producers[id(out)] = name, out  # held, so that no other tensor gets its id
        if out.requires_grad and not _has_partial_output_gradient(module):
            add = functools.partial(self._add_gradient, self.microbatch, name, index, self.order, place)
            out.register_hook(add)

    def _add_gradient(
        self, sample: int, name: str, index: int, order: int, place: Place | None, grad: Tensor
    ) -> None:
        record = Record(
            kind="activation gradient",
            name=name,
            step=self.step,
            sample=sample,
            index=index,
            order=order,
            place=place,
            read_by=tuple(sorted(self.readers.get(name, ()))),
        )
        self.writer.add(record, grad.float() / self.loss_scale)

    def add_mask(self, mask: Tensor) -> None:
        """Add a mask of dropout that the current module drew."""
        if self.microbatch is not None:
            self._add("mask", self.running[-1] if self.running else "", mask != 0)

    def _add(self, kind: str, name: str, values: Tensor, *, place: Place | None = None) -> int:
        """Add a record of the current microbatch. Returns its index among those of the module."""
        index = self.calls.get((kind, name), 0)
        self.calls[kind, name] = index + 1
        self.order += 1
        record = Record(
            kind=kind,
            name=name,
            step=self.step,
            sample=self.microbatch,
            index=index,
            order=self.order,
            place=place,
        )
        self.writer.add(record, values)
        return index

    def _place(self, module: nn.Module, out: Tensor) -> Place | None:
        """Place of a module's output in the output of the whole module, as far as its weight or the batch tells it."""
        tp, shape = self.engine.mesh.tp, tuple(out.shape)
        for _, p in named_parameters(module, recurse=False):
            spec = p.shard_spec
            if spec.dim == 0 and spec.local_shape[0] < spec.shape[0] and shape[-1] == spec.local_shape[0]:
                whole = (*shape[:-1], spec.shape[0])
                return Place(shape=whole, dim=out.ndim - 1, ranges=spec.ranges, local_shape=shape)
        length = self.seq_length
        if tp.size > 1 and out.ndim == 3 and shape[0] * tp.size == length:
            ranges = (tp.local_range(length),)
            return Place(shape=(length, *shape[1:]), dim=0, ranges=ranges, local_shape=shape)
        return None

    @contextmanager
    def _observe(self, phase: str) -> Iterator[None]:
        if phase == "grads-reduce" and self.active:
            self._add_local_gradients()
        yield
        if phase == "grads-reduce" and self.active:
            for param, part, begin in self.engine.buffer.parts(self.engine.optimizer.grads):
                self._add_parameter("gradient", param, part / self.loss_scale, begin)

    def _add_local_gradients(self) -> None:
        """Add the gradients of this rank that are not being reduced yet."""
        reducer = self.engine.buffer.reducer
        for index, bucket in enumerate(self.engine.buffer.buckets):
            for param in bucket.flat_params if index not in reducer.reducing else ():
                values = param.view(self.engine.buffer.grads).flatten() / self.loss_scale
                self._add_parameter("local gradient", param, values, 0, sum_over=("dp",))

    def _add_parameter(
        self,
        kind: str,
        param: FlatParam,
        part: Tensor,
        begin: int,
        *,
        name: str | None = None,
        sum_over: tuple[str, ...] = (),
        step: int | None = None,
    ) -> None:
        record = Record(
            kind=kind,
            name=name or param.name,
            step=self.step if step is None else step,
            place=parameter_place(param.shard_spec, (begin, begin + part.numel())),
            sum_over=sum_over,
        )
        self.writer.add(record, part)

    def add_value(
        self, kind: str, name: str, value: Tensor, *, step: int, sum_over: tuple[str, ...] = ()
    ) -> None:
        """Add a value of the whole batch."""
        self.writer.add(Record(kind=kind, name=name, step=step, sum_over=sum_over), value)

    def end_step(self) -> None:
        """Add the metrics of the step that has just ended, its update and the new state."""
        step, buffer = self.trainer.state.iteration, self.engine.buffer
        _, losses, stats = self.trainer.state.history.pending[-1]
        for name, value in zip(self.engine.task.loss_names, losses, strict=True):
            self.add_value("metric", name, value, step=step, sum_over=("dp", "pp"))
        for name, value in stats.items():
            self.add_value("metric", name, value, step=step)
        changes = [after - before for after, before in zip(buffer.masters, self.before, strict=True)]
        for param, part, begin in buffer.parts(changes):
            self._add_parameter("update", param, part, begin, step=step)
        self.before = []
        self.add_state()

    def add_state(self) -> None:
        """Add master weights, optimizer state and parameters after the last step."""
        step, buffer = self.trainer.state.iteration, self.engine.buffer
        buffer.gather.finish()
        for param, part, begin in () if buffer.is_fp32 else buffer.parts(buffer.masters):
            self._add_parameter("weight", param, part, begin, step=step)
        for state, shards in self.engine.optimizer.state.items():
            for param, part, begin in buffer.parts(shards):
                name = f"{state}/{param.name}"
                self._add_parameter("state", param, part, begin, name=name, step=step)
        for param in buffer.flat_params:
            values = param.view(buffer.params).flatten()
            self._add_parameter("parameter", param, values, 0, step=step)


def _has_partial_output_gradient(module: nn.Module) -> bool:
    """True if ranks share rows of the module's split weight, and each has its part of the gradient of their output."""
    specs = [p.shard_spec for _, p in named_parameters(module, recurse=False)]
    return any(spec.partial and spec.local_shape[0] < spec.shape[0] for spec in specs)


def parameter_place(spec: GlobalSlice, flat: tuple[int, int]) -> Place:
    """Place of elements `flat` of a parameter's local tensor."""
    return Place(
        shape=spec.shape,
        dim=spec.dim,
        ranges=spec.ranges,
        local_shape=spec.local_shape,
        valid=spec.num_valid_rows,
        flat=flat,
    )


class MaskRecorder(TorchDispatchMode):
    """Records the random masks that are drawn in its context."""

    def __init__(self, capture: RunCapture) -> None:
        super().__init__()
        self.capture = capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p):
            self.capture.add_mask(out)
        elif func is torch.ops.aten.native_dropout.default:
            self.capture.add_mask(out[1])
        return out
