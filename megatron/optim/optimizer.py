"""Clip, check and step on flat memory."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.optim.buffer import ParamBuffer, norm
from megatron.optim.config import OptimizerConfig


class Optimizer:
    """AdamW or SGD, from torch, on the master weights of a `ParamBuffer`.

    Nothing in a step makes the host wait for the device: one whose gradients are not finite is left out on the
    device itself.

    Attributes:
        moments: the optimizer's running means, each [size] fp32 in the buffer's layout, by torch's name.
    """

    def __init__(self, buffer: ParamBuffer, config: OptimizerConfig) -> None:
        self.buffer = buffer
        self.clip_grad = config.clip_grad
        self.count_zeros = config.log_num_zeros_in_grad
        parts = [slice(0, buffer.decayed), slice(buffer.decayed, buffer.master.numel())]
        groups = [
            {"params": [self._part(part)], "decays": part.stop <= buffer.decayed}
            for part in parts
            if part.start < part.stop
        ]
        # Fused: one pass over memory, and steps are left out without asking the host.
        if config.optimizer == "adam":
            names = ("exp_avg", "exp_avg_sq")
            betas = (config.adam_beta1, config.adam_beta2)
            self.inner = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)
        else:
            names = ("momentum_buffer",)
            self.inner = torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
        # torch would make its state part by part at the first step; made here, each kind is one flat tensor.
        self.moments = {name: torch.zeros_like(buffer.master) for name in names}
        for group in self.inner.param_groups:
            part = group["params"][0]
            start = part.storage_offset()
            state = {name: flat[start : start + part.numel()] for name, flat in self.moments.items()}
            self.inner.state[part] = {"step": torch.zeros((), device=part.device), **state}

    def _part(self, part: slice) -> Tensor:
        master = self.buffer.master[part]
        master.grad = self.buffer.grads[part]
        return master

    @property
    def steps(self) -> int:
        """Steps taken, those left out not counted. Waits for the device."""
        return int(next(iter(self.inner.state.values()))["step"].item())

    @steps.setter
    def steps(self, value: int) -> None:
        for state in self.inner.state.values():
            state["step"].fill_(value)

    def step(self, *, lr: float, weight_decay: float) -> dict[str, Tensor]:
        """Clip the gradients, update master weights and parameters, and clear the gradients.

        Returns:
            Scalars on the device: "grad norm", the norm before clipping; where it is not finite, nothing has
            been updated. With `count_zeros` also "num zeros", the elements of the gradient that are zero.
        """
        grads = self.buffer.grads
        grad_norm = norm(grads)
        stats = {"grad norm": grad_norm}
        if self.count_zeros:
            stats["num zeros"] = self.buffer.num_elements - torch.count_nonzero(grads)
        if self.clip_grad > 0:
            grads.mul_((self.clip_grad / (grad_norm + 1e-6)).clamp(max=1.0))
        # torch's fused optimizers do nothing where found_inf is 1, and the host need not know.
        self.inner.found_inf = (~grad_norm.isfinite()).float()
        self.inner.grad_scale = None
        for group in self.inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self.inner.step()
        self.buffer.copy_master_to_params()
        grads.zero_()
        return stats
