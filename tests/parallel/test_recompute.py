"""Memory kept by activation recomputation."""

from __future__ import annotations

import torch

from megatron.ops.attention import kernels
from megatron.parallel.mesh import Axis
from megatron.parallel.recompute import recompute


def test_distributed_inputs_keep_only_the_local_shard() -> None:
    x = torch.ones(4, 2, 8, requires_grad=True)
    out = recompute(lambda x: x * 2, x, Axis(rank=1, size=2))
    (kept,) = out.grad_fn.saved_tensors
    assert kept.untyped_storage().nbytes() == x.numel() * 4 // 2


def test_recomputed_attention_may_use_the_same_gpu_kernels() -> None:
    # Kernels draw their dropout in different ways.
    seen = []

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(type(kernels(torch.device("cuda"))))
        return x * 2

    recompute(run, torch.ones(3, requires_grad=True)).sum().backward()
    assert len(seen) == 2
    assert seen[0] is seen[1]
    with torch.inference_mode():
        run(torch.ones(3))
    assert seen[2] is not seen[1]
