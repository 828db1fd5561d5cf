"""AdamW with moments in bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# Elements converted to fp32 at once: on a CPU they fit the cache; on a GPU they hide the kernels' launches.
CHUNK_SIZE = {"cpu": 1 << 17, "cuda": 1 << 23}
# Conjugate of the golden ratio. The fractional parts of its multiples cover 0 to 1 evenly (an additive recurrence).
GOLDEN = 0.6180339887498949


def bf16_adamw(
    params: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    _: list[Tensor],
    steps: list[Tensor],
    **settings: Any,
) -> None:
    """Run torch's fused `adamw` on fp32 parameters with bf16 moments.

    torch requires moments in the dtype of the parameters, so it gets fp32 copies of a chunk of them at a time.

    With beta2 = 0.999 a step lowers a second moment by a thousandth at most, but adjacent bf16 numbers differ by one
    part in 128 to 256: with round-to-nearest it would never fall. Here it is rounded up if the part that bf16 cuts off
    exceeds a threshold that covers all values evenly over the steps. Like stochastic rounding this is unbiased, but it
    needs no random numbers.
    """
    for p, grad, mean, square, step in zip(params, grads, means, squares, steps, strict=True):
        lift = (step.double() * GOLDEN % 1 * 65536).int()
        size = CHUNK_SIZE[p.device.type]
        after = step  # a shard may be empty
        for begin in range(0, p.numel(), size):
            part = slice(begin, begin + size)
            wide = mean[part].float(), square[part].float()
            after = step.clone()
            adamw([p[part]], [grad[part]], [wide[0]], [wide[1]], [], [after], **settings)
            mean[part], square[part] = (rounded(x, lift) for x in wide)
        step.copy_(after)


def rounded(x: Tensor, lift: Tensor) -> Tensor:
    """Round fp32 to values of bf16: add `lift`, an int32 of 0 to 65535, to the 16 low bits, then clear these."""
    return (x.view(torch.int32) + lift).bitwise_and_(-65536).view(torch.float32)
