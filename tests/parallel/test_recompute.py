"""Memory kept by activation recomputation."""

from __future__ import annotations

import torch

from megatron.parallel.mesh import Axis
from megatron.parallel.recompute import recompute


def test_distributed_inputs_keep_only_the_local_shard() -> None:
    x = torch.ones(4, 2, 8, requires_grad=True)
    out = recompute(lambda x: x * 2, x, Axis(rank=1, size=2))
    (kept,) = out.grad_fn.saved_tensors
    assert kept.untyped_storage().nbytes() == x.numel() * 4 // 2
