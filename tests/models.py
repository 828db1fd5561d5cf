"""Models for tests, on one process."""

from __future__ import annotations

import torch
from torch import nn

from megatron.optim.buffer import ParamBuffer
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Mesh

CPU = torch.device("cpu")


def flat(model: nn.Module, dtype: torch.dtype = torch.float32, **parallel) -> ParamBuffer:
    """The parameters of a model in flat memory, without values."""
    return ParamBuffer([model], Mesh(device=CPU), ParallelConfig(**parallel), dtype=dtype)
