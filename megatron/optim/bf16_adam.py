"""AdamW with its moments in bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# Elements whose moments are widened to fp32 at once, by the kind of device: what stays in a CPU's cache; on a GPU so
# many that starting kernels takes no time, and still few beside a model.
PIECES = {"cpu": 1 << 17, "cuda": 1 << 23}
# Its multiples, less their whole parts, are spread evenly over 0 to 1, however many of them are taken.
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
    """torch's fused `adamw` of fp32 parameters whose two moments are bf16.

    It wants them in the dtype of the parameters, so that it is given copies, a piece at a time.

    A step lowers a second moment by a thousandth at most (1 - beta2), and neighbouring bf16 numbers differ by one part
    in 128 to 256: rounded to the nearest, it would never fall. So it is rounded up where what bf16 cuts off is above a
    threshold, which goes evenly through all values from step to step. Then the mean over steps is right, as with
    stochastic rounding, and no random numbers are needed.
    """
    for p, grad, mean, square, step in zip(params, grads, means, squares, steps, strict=True):
        lift = (step.double() * GOLDEN % 1 * 65536).int()
        size = PIECES[p.device.type]
        for begin in range(0, p.numel(), size):
            part = slice(begin, begin + size)
            wide = mean[part].float(), square[part].float()
            after = step.clone()
            adamw([p[part]], [grad[part]], [wide[0]], [wide[1]], [], [after], **settings)
            mean[part], square[part] = (rounded(x, lift) for x in wide)
        step.copy_(after)


def rounded(x: Tensor, lift: Tensor) -> Tensor:
    """fp32 as fp32 that bf16 holds: `lift`, int32 of 0 to 65535, is added to the 16 bits that are cut off then."""
    return (x.view(torch.int32) + lift).bitwise_and_(-65536).view(torch.float32)
