"""The pass of a microbatch, forward and backward, as a CUDA graph.

A GPU is through with the kernels of a small model sooner than its host can launch them. A graph is a list of kernels
and of the memory that each works on, launched at once: PyTorch makes it of what a stream is given while it is captured
("whole-network capture" in its notes on CUDA). So what differs from one microbatch to the next is copied to the same
memory first, and nothing in a pass may depend on a value that the host alone knows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.flags import InputError
from megatron.training.config import RunConfig
from megatron.training.task import Task

# Passes that run as they are written before one is captured. In them code is compiled and tuned, kernels are loaded and
# libraries take their memory, none of which a capture admits.
WARM_UP = 3

# By name: a batch, and whatever else differs from one microbatch to the next.
Inputs = dict[str, Tensor]


class GraphedPass:
    """A function of tensors on a GPU that is captured once and then replayed.

    Attributes:
        inputs: what the graph reads, filled anew for each call.
        graph: None until it is captured.
        output: what the graph writes.
    """

    def __init__(self, compute: Callable[[Inputs], Tensor], device: torch.device) -> None:
        """`compute` may change other memory, such as gradients, as long as that stays where it is."""
        self.compute = compute
        # Also of the passes before the capture. A parameter's node in the autograd graph keeps the stream that it was
        # made on: one of another stream would draw that stream into the capture, which fails.
        self.stream = torch.cuda.Stream(device)
        self.inputs: Inputs = {}
        self.warm_ups = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: Tensor | None = None

    def __call__(self, inputs: Inputs) -> Tensor:
        """compute(inputs): names and shapes are the same each time. What it gives is overwritten by the next call."""
        for name, tensor in inputs.items():
            if name not in self.inputs:
                self.inputs[name] = torch.empty_like(tensor)
            assert self.inputs[name].shape == tensor.shape, name
            self.inputs[name].copy_(tensor)
        if self.warm_ups < WARM_UP:
            self.warm_ups += 1
            return self._warm_up()
        if self.graph is None:
            self._capture()
        self.graph.replay()
        return self.output

    def _warm_up(self) -> Tensor:
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            output = self.compute(self.inputs)
        here.wait_stream(self.stream)
        return output

    def _capture(self) -> None:
        """Note down a pass. Nothing is computed."""
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, which prepare batches or watch over communication, may ask the GPU meanwhile.
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self.output = self.compute(self.inputs)


def check_cuda_graph(config: RunConfig, task: Task, device: torch.device) -> None:
    """Make sure that one microbatch of a run is the same work on a GPU as the next.

    Raises:
        InputError: naming what makes it differ.
    """
    parallel, model = config.parallel, config.model
    faults = (
        (device.type != "cuda", f"needs a GPU, and this run computes on {device}; leave it out"),
        (not task.is_static, f"needs batches of one length, and those of {task.name} differ; leave it out"),
        (
            parallel.pipeline_model_parallel_size > 1,
            "captures a pass as a whole, and a pipeline's stages pass on parts of it; leave it out, or use "
            "--pipeline-model-parallel-size 1",
        ),
        (
            parallel.tensor_model_parallel_size > 1,
            "captures no communication, and tensor parallelism's is within a pass; leave it out, or use "
            "--tensor-model-parallel-size 1",
        ),
        (
            parallel.overlap_grad_reduce,
            "captures no communication, and --overlap-grad-reduce has it within a pass; leave one of them out",
        ),
        (
            parallel.overlap_param_gather,
            "captures no communication, and --overlap-param-gather has it within a pass; leave one of them out",
        ),
        (
            max(model.hidden_dropout, model.attention_dropout) > 0,
            "would drop the same values of every microbatch; use --hidden-dropout 0 --attention-dropout 0",
        ),
        (
            config.logging.timing_log_level > 1,
            "runs a pass as one, which --timing-log-level 2 would time in parts; use --timing-log-level 1",
        ),
    )
    for is_so, why in faults:
        if is_so:
            raise InputError(f"--cuda-graph {why}")
