"""Lion against algorithm 2 of arXiv 2302.06675 in fp64."""

from __future__ import annotations

import torch

from megatron.optim.lion import Lion, LionConfig
from megatron.optim.spec import Shard, StepInputs


def test_equals_the_paper() -> None:
    beta1, beta2, lr, decay = 0.8, 0.95, 1e-2, 0.1
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1000, generator=generator).double()
    ours, momentum = weight.clone(), torch.zeros_like(weight)
    state = {"exp_avg": torch.zeros_like(weight)}
    lion = Lion(LionConfig(lion_beta1=beta1, lion_beta2=beta2))
    taken, skipped, scale = torch.tensor([0.0, 1.0, 4.0]).double()
    for step in range(20):
        grad = torch.randn(1000, generator=generator).double()
        grad[step * 40 : step * 40 + 80] = 0  # the sign of 0 is 0
        update = (beta1 * momentum + (1 - beta1) * grad).sign()
        weight = weight - lr * (update + decay * weight)
        momentum = beta2 * momentum + (1 - beta2) * grad
        settings = {"lr": lr, "weight_decay": decay, "steps": taken, "grad_scale": scale}
        lion.step([Shard(ours, grad * 4, state)], StepInputs(**settings, found_inf=taken))
        lion.step([Shard(ours, grad * torch.nan, state)], StepInputs(**settings, found_inf=skipped))
        torch.testing.assert_close(state["exp_avg"], momentum, rtol=0, atol=1e-14)
        torch.testing.assert_close(ours, weight, rtol=0, atol=1e-14)
