"""Clip, check and step on flat memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.optim.bf16_adam import bf16_adamw
from megatron.optim.buffer import ParamBuffer
from megatron.optim.config import OptimizerConfig
from megatron.optim.gate import Gate
from megatron.optim.scaler import LossScaler


class Optimizer:
    """AdamW or SGD, from torch, on the master weights of a `ParamBuffer`.

    The functions, not the classes, which import torch's compiler: a second at the start of each process. Nothing in a
    step makes the host wait for the device: whether one is left out is decided on the device itself.

    Attributes:
        gate: decides it.
        scaler: of the loss, where parameters are fp16.
        moments: the optimizer's running means, fp32 or bf16, by torch's name: of each bucket what is owned here.
    """

    def __init__(self, buffer: ParamBuffer, config: OptimizerConfig) -> None:
        self.buffer, self.config = buffer, config
        self.longest = config.clip_grad or math.inf
        self.count_zeros = config.log_num_zeros_in_grad
        self.gate = Gate(config, buffer.params.device)
        is_fp16 = buffer.params.dtype == torch.float16
        self.scaler = LossScaler(config, buffer.params.device) if is_fp16 else None
        self.grads = buffer.owned(buffer.grads)
        dtype = torch.bfloat16 if config.bf16_optimizer_states else torch.float32
        self.moments = {
            name: [torch.zeros_like(master, dtype=dtype) for master in buffer.masters]
            for name in MOMENTS[config.optimizer]
        }
        self.counts = [torch.zeros((), device=master.device) for master in buffer.masters]

    @property
    def steps(self) -> int:
        """Steps taken, those left out not counted. Waits for the device."""
        return int(self.counts[0].item())

    @steps.setter
    def steps(self, value: int) -> None:
        for count in self.counts:
            count.fill_(value)

    @property
    def loss_scale(self) -> Tensor | float:
        """What the loss is to be multiplied by before backward; `step` divides the gradients by it."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @torch.no_grad()
    def step(self, *, lr: float, weight_decay: float, loss: Tensor | None = None) -> dict[str, Tensor]:
        """Clip the gradients, update master weights and parameters, and clear the gradients.

        `loss` is the step's, on the whole global batch, which `--spike-skip` needs.

        Returns:
            Scalars on the device, of the whole model: "grad norm", the norm before clipping; "skipped", 1 where
            nothing has been updated; with `count_zeros` also "num zeros", the elements of the gradient that are
            zero; in fp16 also "overflow", 1 where the scale of the loss may be why the gradient is not finite, and
            "loss scale", that of the next step.
        """
        buffer, loss_scale = self.buffer, self.loss_scale
        grad_norm = buffer.norm(self.grads) / loss_scale
        excused = None if self.scaler is None else self.scaler.can_fall()
        stats = {"grad norm": grad_norm, "skipped": self.gate.leaves_out(grad_norm, loss, excused)}
        if self.scaler is not None:
            overflow = ~grad_norm.isfinite()
            self.scaler.update(overflow, hold=self.gate.shut.bool())
            stats |= {"overflow": (overflow & excused).float(), "loss scale": self.scaler.scale}
        if self.count_zeros:
            nonzero = buffer.total(self.grads, torch.count_nonzero)
            stats["num zeros"] = (buffer.num_elements - nonzero).float()
        divisor = None
        if self.scaler is not None or self.longest < math.inf:
            divisor = loss_scale * ((grad_norm + 1e-6) / self.longest).clamp(min=1.0)
        for decays in (True, False):
            decay = weight_decay if decays else 0.0
            self._update(decays, lr=lr, weight_decay=decay, grad_scale=divisor, found_inf=stats["skipped"])
        buffer.publish()
        buffer.grads.zero_()
        return stats

    def _update(self, decays: bool, **settings: Any) -> None:
        """Step the buckets that decay, or those that do not, by torch's fused kernels: they divide the gradients by
        `grad_scale`, and do nothing where `found_inf` is 1, so that the host need not know and memory is not gone
        through once more."""
        config = self.config
        chosen = [i for i, bucket in enumerate(self.buffer.buckets) if bucket.decays == decays]
        state = (self.buffer.masters, self.grads, *self.moments.values())
        masters, grads, *moments = ([pieces[i] for i in chosen] for pieces in state)
        if config.optimizer == "sgd":
            sgd(
                masters,
                grads,
                *moments,
                momentum=config.sgd_momentum,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                fused=True,
                **settings,
            )
            return
        update = bf16_adamw if config.bf16_optimizer_states else adamw
        update(
            masters,
            grads,
            *moments,
            [],
            [self.counts[i] for i in chosen],
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            amsgrad=False,
            maximize=False,
            fused=True,
            **settings,
        )


# The running means of each optimizer.
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
