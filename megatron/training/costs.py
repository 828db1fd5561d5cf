"""Whether what a process keeps of a model fits its memory."""

from __future__ import annotations

import os

import torch

from megatron.flags import InputError
from megatron.optim.config import OptimizerConfig
from megatron.optim.layout import Bucket
from megatron.optim.optimizer import MOMENTS


def check_memory(buckets: list[Bucket], config: OptimizerConfig, *, half: bool, device: torch.device) -> None:
    """Refuse a model whose weights, gradients and optimizer state alone are more than the device holds; parameters take
    two bytes if `half`, else four.

    Raises:
        InputError: with both numbers.
    """
    size, owned = buckets[-1].end, sum(end - begin for begin, end in (b.owned for b in buckets))
    # Parameters and fp32 gradients; fp32 master weights where the parameters are not; the optimizer's means.
    moments = len(MOMENTS[config.optimizer]) * (2 if config.bf16_optimizer_states else 4)
    needed = size * ((2 if half else 4) + 4) + owned * (4 * half + moments)
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"{size:,} parameters on one process need {needed / 1e9:,.1f} GB for weights, gradients and the "
            f"state of {config.optimizer}, but {device} has {available / 1e9:,.1f} GB; lower --num-layers or "
            "--hidden-size, or divide the model (--tensor-model-parallel-size, --pipeline-model-parallel-size, "
            "--use-distributed-optimizer)"
        )
