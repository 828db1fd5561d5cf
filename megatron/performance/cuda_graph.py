"""Forward and backward of a microbatch as one CUDA graph.

A GPU runs the kernels of a small model faster than the host launches them. A CUDA graph launches a recorded list of
kernels, with fixed memory addresses, at once ("whole-network capture" in PyTorch's notes on CUDA). Inputs are therefore
copied to the same memory for every microbatch, and no kernel may depend on a value that only the host knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron.data.batch import Batch
from megatron.errors import InputError
from megatron.ops.backend import Ops
from megatron.parallel.mesh import choose_device
from megatron.performance.compiled_layer import CounterKey
from megatron.performance.config import PerformanceConfig
from megatron.training.batch_size import BatchSchedule
from megatron.training.config import RunConfig
from megatron.training.engine import Engine, GlobalBatch
from megatron.training.loop import Hook, Trainer
from megatron.training.stage import MeanLoss
from megatron.training.task import Task

# Eager passes before the capture. They compile code, load kernels and allocate libraries' workspaces, none of which may
# happen during a capture.
WARM_UP = 3

# Tensors that change from step to step, by name.
StepTensors = dict[str, Tensor]


class CudaGraph(Hook):
    """Run forward and backward of a microbatch as one CUDA graph (--cuda-graph)."""

    def during_run(self, trainer: Trainer) -> AbstractContextManager[object]:
        if trainer.config.plugin(PerformanceConfig).cuda_graph:
            check_dropout(trainer.config, trainer.engine.ops)
            use_cuda_graph(trainer.engine)
        return nullcontext()


def use_cuda_graph(engine: Engine) -> GraphedPass:
    """Replace the pipeline schedule of an engine by a CUDA graph, which is returned.

    Passes that communicate run without it: the first of a step, which waits for parameters with
    --overlap-param-gather, and the last, which reduces gradients with --overlap-grad-reduce.
    """

    def compute(batch: Batch, step: StepTensors) -> Tensor:
        """Forward and backward of one microbatch through the whole model.

        Args:
            step: the denominators of the global batch, with fp16 the loss scale, and with dropout the words of its key.

        Returns:
            [terms] the microbatch's share of the mean losses.
        """
        loss = MeanLoss(step["denominators"], step["loss_scale"])
        # The masks depend on the words alone.
        key = CounterKey(seed=0, sample=0, words=step["dropout"]) if "dropout" in step else None
        loss.add(engine.task.forward(engine.modules[0], batch, None, key)).backward()
        return loss.total

    def run_passes(batch: GlobalBatch, loss: MeanLoss) -> None:
        step = {"denominators": batch.denominators, "loss_scale": loss.loss_scale}
        captured = range(*passes_in_graph(engine.config, len(batch.microbatches)))
        for i, (microbatch, key) in enumerate(zip(batch.microbatches, batch.dropout_keys, strict=True)):
            if i == captured.stop:
                run_pipeline(dataclasses.replace(batch, microbatches=[microbatch], dropout_keys=[key]), loss)
                continue
            if engine.config.model.hidden_dropout and isinstance(key, CounterKey) and key.words is not None:
                step["dropout"] = key.words
            loss.total.add_((graph if i in captured else compute)(microbatch, step))
            engine.mesh.heartbeat.steps += 1

    graph, run_pipeline = GraphedPass(compute, engine.mesh.device), engine.run_passes
    engine.run_passes = run_passes
    return graph


def passes_in_graph(config: RunConfig, microbatches: int) -> tuple[int, int]:
    """First pass of a step that the graph runs, and the first after it that it does not."""
    parallel = config.parallel
    return int(parallel.overlap_param_gather), microbatches - parallel.overlap_grad_reduce


class GraphedPass:
    """A function of tensors on a GPU that is captured once and then replayed.

    Attributes:
        batch, step: the tensors that the graph reads, overwritten by each call.
        captured: the graph and the tensor that it writes; None before the capture.
    """

    def __init__(self, compute: Callable[[Any, StepTensors], Tensor], device: torch.device) -> None:
        """`compute` may write to other memory, such as gradients, as long as its address does not change."""
        self.compute = compute
        # Warm-up passes use it too: a parameter's autograd node keeps the stream it was created on, and a node of
        # another stream would pull that stream into the capture, which fails.
        self.stream = torch.cuda.Stream(device)
        self.batch: Batch | None = None
        self.step: StepTensors = {}
        self.warm_ups = 0
        self.captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def __call__(self, batch: Batch, step: StepTensors) -> Tensor:
        """Return compute(batch, step), which the next call overwrites. Names and shapes must not change."""
        if self.batch is None:
            self.batch = batch.map(torch.empty_like)
            self.step = {name: torch.empty_like(tensor) for name, tensor in step.items()}
        targets, sources = dict(self.batch.items()) | self.step, dict(batch.items()) | step
        assert targets.keys() == sources.keys()
        for name, target in targets.items():
            assert target.shape == sources[name].shape, name
            target.copy_(sources[name])
        if self.warm_ups < WARM_UP:
            self.warm_ups += 1
            return self._warm_up()
        if self.captured is None:
            self.captured = self._capture()
        graph, output = self.captured
        graph.replay()
        return output

    def _warm_up(self) -> Tensor:
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            output = self.compute(self.batch, self.step)
        here.wait_stream(self.stream)
        return output

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Record a pass without running it."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads, which prepare batches or watch communication, may call CUDA meanwhile.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            return graph, self.compute(self.batch, self.step)


def check_cuda_graph(config: RunConfig, task: Task) -> None:
    """Check the device and the task of a run with --cuda-graph, before processes communicate.

    Raises:
        InputError: there is no GPU, or microbatches would not all launch the same kernels.
    """
    if not config.plugin(PerformanceConfig).cuda_graph:
        return
    device = choose_device(config.training.device)
    if device.type != "cuda":
        raise InputError(f"--cuda-graph needs a GPU, and this run computes on {device}; leave it out")
    if not task.is_static:
        raise InputError(
            f"--cuda-graph needs batches of one length, and those of {task.name} differ; leave it out"
        )


def check_dropout(config: RunConfig, ops: Ops) -> None:
    """Check that the layers of a run with --cuda-graph draw other dropout masks for every microbatch.

    Raises:
        InputError: they do not.
    """
    if config.model.hidden_dropout > 0 and ops.device_keys is None:
        raise InputError(
            "--cuda-graph would drop the same values of every microbatch, since only compiled layers draw them from a "
            "key on the GPU; use --hidden-dropout 0, or leave out --ops-backend and --no-torch-compile"
        )


def check_graphed_passes(config: RunConfig, batches: BatchSchedule) -> None:
    """Check that the graph of a run with --cuda-graph runs any of the microbatches of a run's largest step.

    Raises:
        InputError: all of them communicate.
    """
    microbatches = batches.max_microbatches
    begin, end = passes_in_graph(config, microbatches)
    if config.plugin(PerformanceConfig).cuda_graph and begin >= end:
        raise InputError(
            "--cuda-graph captures no communication; --overlap-param-gather and --overlap-grad-reduce have it in the "
            f"first and the last microbatch of a step, and a step has {microbatches}; leave out one of the flags"
        )
