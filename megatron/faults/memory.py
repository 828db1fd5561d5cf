"""Check that the static memory of a model fits the device, and explain errors of too little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.errors import InputError
from megatron.optim.config import OptimizerConfig
from megatron.optim.layout import Bucket
from megatron.parallel.mesh import choose_device
from megatron.training.config import RunConfig
from megatron.training.stage import StageModel


def check_model_memory(config: RunConfig, model: StageModel, device: torch.device) -> None:
    """Check the memory of a run's model, as `check_memory`."""
    half = config.training.precision != "fp32"
    check_memory(model.buckets, config.optimizer, half=half, device=device)


def check_memory(buckets: list[Bucket], config: OptimizerConfig, *, half: bool, device: torch.device) -> None:
    """Check that weights, gradients and optimizer state fit the device.

    Args:
        half: parameters take two bytes in place of four.

    Raises:
        InputError: they do not fit; names both sizes.
    """
    size = buckets[-1].end
    needed = size * ((2 if half else 4) + 4)  # parameters and fp32 gradients
    for bucket in buckets:
        state = sum(dtype.itemsize for dtype in bucket.group.optimizer.state_dtypes.values())
        # fp32 master weights, where parameters are not fp32, and optimizer state
        needed += (bucket.shard[1] - bucket.shard[0]) * (4 * half + state)
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"{size:,} parameters on one process need {needed / 1e9:,.1f} GB for weights, gradients and the "
            f"state of {config.optimizer}, but {device} has {available / 1e9:,.1f} GB; lower --num-layers or "
            "--hidden-size, or split the model (--tensor-model-parallel-size, --pipeline-model-parallel-size, "
            "--use-distributed-optimizer)"
        )


@contextmanager
def memory_errors_explained(config: RunConfig) -> Iterator[None]:
    """Turn an out-of-memory error of a run into an `InputError` that names the flags to lower."""
    try:
        yield
    except RuntimeError as error:
        # A CPU's allocator has no exception type of its own.
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise InputError(
                f"{choose_device(config.training.device)} has too little memory for this run; lower "
                f"--micro-batch-size {config.training.micro_batch_size}, --seq-length {config.data.seq_length} or the "
                "model's size"
            ) from error
        raise
