"""Clip, check and step on flat memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.optim.bf16_adam import BF16AdamW
from megatron.optim.buffer import ParamBuffer
from megatron.optim.config import OptimizerConfig
from megatron.optim.gate import Gate
from megatron.optim.scaler import LossScaler


class Optimizer:
    """AdamW or SGD, from torch, on the master weights of a `ParamBuffer`.

    Nothing in a step makes the host wait for the device: whether one is left out is decided on the device itself.

    Attributes:
        gate: decides it.
        scaler: of the loss, where parameters are fp16.
        moments: the optimizer's running means, fp32 or bf16, by torch's name: of each bucket what is owned here.
    """

    def __init__(self, buffer: ParamBuffer, config: OptimizerConfig) -> None:
        self.buffer = buffer
        self.longest = config.clip_grad or math.inf
        self.count_zeros = config.log_num_zeros_in_grad
        self.gate = Gate(config, buffer.params.device)
        is_fp16 = buffer.params.dtype == torch.float16
        self.scaler = LossScaler(config, buffer.params.device) if is_fp16 else None
        self.grads = buffer.owned(buffer.grads)
        groups = []
        for decays in (True, False):
            pieces = [
                piece
                for bucket, piece in zip(buffer.buckets, buffer.masters, strict=True)
                if bucket.decays == decays
            ]
            if pieces:
                groups.append({"params": pieces, "decays": decays})
        for master, grad in zip(buffer.masters, self.grads, strict=True):
            master.grad = grad
        # Fused: one pass over memory, and steps are left out without asking the host.
        if config.optimizer == "adam":
            betas = (config.adam_beta1, config.adam_beta2)
            kind = BF16AdamW if config.bf16_optimizer_states else torch.optim.AdamW
            self.inner = kind(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)
        else:
            self.inner = torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
        # torch would make its state at the first step; it is made here, so that a checkpoint can fill it before.
        dtype = torch.bfloat16 if config.bf16_optimizer_states else torch.float32
        self.moments = {
            name: [torch.zeros_like(master, dtype=dtype) for master in buffer.masters]
            for name in MOMENTS[config.optimizer]
        }
        for i, master in enumerate(buffer.masters):
            state = {name: pieces[i] for name, pieces in self.moments.items()}
            self.inner.state[master] = {"step": torch.zeros((), device=master.device), **state}

    @property
    def steps(self) -> int:
        """Steps taken, those left out not counted. Waits for the device."""
        return int(next(iter(self.inner.state.values()))["step"].item())

    @steps.setter
    def steps(self, value: int) -> None:
        for state in self.inner.state.values():
            state["step"].fill_(value)

    @property
    def loss_scale(self) -> Tensor | float:
        """What the loss is to be multiplied by before backward; `step` divides the gradients by it."""
        return 1.0 if self.scaler is None else self.scaler.scale

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
        # torch's fused optimizers divide the gradients, and do nothing where found_inf is 1, so that the host need not
        # know and memory is not gone through once more.
        self.inner.grad_scale = None
        if self.scaler is not None or self.longest < math.inf:
            self.inner.grad_scale = loss_scale * ((grad_norm + 1e-6) / self.longest).clamp(min=1.0)
        self.inner.found_inf = stats["skipped"]
        for group in self.inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self.inner.step()
        buffer.publish()
        buffer.grads.zero_()
        return stats


# The running means of each optimizer.
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
