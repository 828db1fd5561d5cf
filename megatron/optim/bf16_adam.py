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


class BF16AdamW(torch.optim.AdamW):
    """AdamW of fp32 parameters whose "exp_avg" and "exp_avg_sq" are bf16.

    torch's fused step wants them in the dtype of the parameters, so that it is given copies, a piece at a time.

    A step lowers a second moment by a thousandth at most (1 - beta2), and neighbouring bf16 numbers differ by one part
    in 128 to 256: rounded to the nearest, it would never fall. So it is rounded up where what bf16 cuts off is above a
    threshold, which goes evenly through all values from step to step. Then the mean over steps is right, as with
    stochastic rounding, and no random numbers are needed.
    """

    @torch.no_grad()
    def step(self) -> None:
        """As that of torch, of the gradients divided by `grad_scale`; nothing changes where `found_inf` is 1."""
        for group in self.param_groups:
            for p in group["params"]:
                self._step(p, self.state[p], group)

    def _step(self, p: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        lift = (state["step"].double() * GOLDEN % 1 * 65536).int()
        size = PIECES[p.device.type]
        for begin in range(0, p.numel(), size):
            part = slice(begin, begin + size)
            mean, square = state["exp_avg"][part].float(), state["exp_avg_sq"][part].float()
            steps = state["step"].clone()
            adamw(
                [p[part]],
                [p.grad[part]],
                [mean],
                [square],
                [],
                [steps],
                fused=True,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            state["exp_avg"][part] = rounded(mean, lift)
            state["exp_avg_sq"][part] = rounded(square, lift)
        state["step"].copy_(steps)


def rounded(x: Tensor, lift: Tensor) -> Tensor:
    """fp32 as fp32 that bf16 holds: `lift`, int32 of 0 to 65535, is added to the 16 bits that are cut off then."""
    return (x.view(torch.int32) + lift).bitwise_and_(-65536).view(torch.float32)
