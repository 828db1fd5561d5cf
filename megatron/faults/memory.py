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

    This is a lower bound: with sharded gradients or parameters, the whole buckets of a layer come on top during passes.

    Args:
        half: parameters take two bytes in place of four.

    Raises:
        InputError: they do not fit; names both sizes.
    """
    needed = 0
    for bucket in buckets:
        group, whole, shard = bucket.group, bucket.end - bucket.start, bucket.shard[1] - bucket.shard[0]
        needed += (shard if group.shards_params else whole) * (2 if half else 4)
        needed += (shard if group.shards_grads else whole) * 4  # in fp32
        if device.type == "cuda" and group.optimizer.on_host:
            continue
        # fp32 master weights, where parameters are not fp32, and optimizer state
        needed += shard * (4 * half + sum(dtype.itemsize for dtype in group.optimizer.state_dtypes.values()))
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"{buckets[-1].end:,} parameters need {needed / 1e9:,.1f} GB on each process for weights, gradients and "
            f"the state of {config.optimizer}, but {device} has {available / 1e9:,.1f} GB; lower --num-layers or "
            "--hidden-size, or split the model (--tensor-model-parallel-size, --pipeline-model-parallel-size, "
            "--data-parallel-sharding-strategy)"
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
