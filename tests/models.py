"""Models for tests."""

from __future__ import annotations

import torch
from torch import nn

from megatron.optim.buffer import ParamBuffer
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Mesh

CPU = torch.device("cpu")


def flat(
    model: nn.Module,
    dtype: torch.dtype = torch.float32,
    *,
    mesh: Mesh | None = None,
    config: ParallelConfig | None = None,
) -> ParamBuffer:
    """The parameters of a model in flat memory, without values; of one process, if no mesh is given."""
    return ParamBuffer([model], mesh or Mesh(device=CPU), config or ParallelConfig(), dtype=dtype)
