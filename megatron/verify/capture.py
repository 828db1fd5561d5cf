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
from torch import Tensor

from megatron import __version__
from megatron.optim.layout import FlatParam
from megatron.parallel.slices import GlobalSlice
from megatron.performance.compiled_layer import uncompiled
from megatron.training.engine import GlobalBatch
from megatron.training.loop import Hook, Trainer
from megatron.training.report import EvalResult
from megatron.training.stage import MeanLoss
from megatron.verify.config import CaptureConfig
from megatron.verify.format import CaptureWriter, Place, Record
from megatron.verify.passes import PassCapture


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
            trainer.log(f"wrote a capture of the first steps to {config.capture}")

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
        replicas: axes of the ranks that hold the same dense parameters.
        expert_coordinates: of this rank, by the axes that divide experts.
    """

    def __init__(self, trainer: Trainer, config: CaptureConfig) -> None:
        mesh = trainer.mesh
        self.trainer, self.engine = trainer, trainer.engine
        self.first, self.steps = trainer.state.iteration, config.capture_steps
        axes = {"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp}
        if mesh.cp.size > 1:
            axes["cp"] = mesh.cp
        self.replicas = tuple(name for name in ("dp", "cp") if name in axes)
        expert_axes = {}
        if trainer.config.model.num_experts is not None:
            expert_axes = {"pp": mesh.pp, "expert_dp": mesh.expert_dp, "expert": mesh.expert}
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
            sizes={name: axis.size for name, axis in (axes | expert_axes).items()},
            run=run,
            max_bytes=config.capture_megabytes * 10**6,
        )
        self.expert_coordinates = {name: axis.rank for name, axis in expert_axes.items()}
        self.passes = PassCapture(self.writer, mesh, tuple(trainer.engine.task.loss_names))
        self.before: list[Tensor] = []

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
        handles = [handle for module in engine.modules for handle in self.passes.hooked(module)]
        engine.task = dataclasses.replace(task, forward=functools.partial(self.passes.forward, task.forward))
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
        self.writer.flush()
        if self.step - self.first <= self.steps:
            self.engine.optimizer.finish()
            self.before = [master.clone() for master in self.engine.buffer.masters]
            self.passes.step, self.passes.samples = self.step, self._first_samples(batch)
            self.passes.calls.clear()
            self.passes.loss_scale = float(self.engine.optimizer.loss_scale)
            self.add_value("metric", "loss denominators", batch.denominators, step=self.step)
        with uncompiled(self.engine.ops):
            inner(batch, loss)
        self.passes.samples = {}

    def _first_samples(self, batch: GlobalBatch) -> dict[int, int]:
        """Index in the run of the first sample of each microbatch, by the microbatch's id()."""
        dp, size = self.engine.mesh.dp, self.trainer.config.training.micro_batch_size
        consumed = self.trainer.state.consumed_samples
        return {id(b): consumed + (i * dp.size + dp.rank) * size for i, b in enumerate(batch.microbatches)}

    @contextmanager
    def _observe(self, phase: str) -> Iterator[None]:
        if phase == "grads-reduce" and self.active:
            self._add_local_gradients()
        yield
        if phase == "grads-reduce" and self.active:
            for param, part, begin in self.engine.buffer.parts(self.engine.optimizer.grads):
                self._add_parameter("gradient", param, part / self.passes.loss_scale, begin)

    def _add_local_gradients(self) -> None:
        """Add the gradients of this rank that are not being reduced yet."""
        reducer = self.engine.buffer.reducer
        for index, bucket in enumerate(self.engine.buffer.buckets):
            kept = index not in reducer.reducing and reducer.memory.has(index)
            for param in bucket.flat_params if kept else ():
                values = self.engine.buffer.grad_memory.view(param).flatten() / self.passes.loss_scale
                replicas = ("expert_dp",) if param.shard_spec.expert_parallel else self.replicas
                self._add_parameter("local gradient", param, values, 0, sum_over=replicas)

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
            coordinates=self.expert_coordinates if param.shard_spec.expert_parallel else {},
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
        self.engine.optimizer.finish()
        _, losses, stats = self.trainer.state.history.pending[-1]
        for name, value in zip(self.engine.task.loss_names, losses, strict=True):
            self.add_value("metric", name, value, step=step, sum_over=(*self.replicas, "pp"))
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
        self.engine.optimizer.finish()
        buffer.gather.finish()
        for param, part, begin in () if buffer.is_fp32 else buffer.parts(buffer.masters):
            self._add_parameter("weight", param, part, begin, step=step)
        for state, shards in self.engine.optimizer.state.items():
            for param, part, begin in buffer.parts(shards):
                name = f"{state}/{param.name}"
                self._add_parameter("state", param, part, begin, name=name, step=step)
        for param, part, begin in buffer.held_params():
            self._add_parameter("parameter", param, part, begin, step=step)


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
