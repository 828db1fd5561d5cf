"""Adam with its moments in bf16, against torch's in fp32."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.optim import bf16_adam
from megatron.optim.bf16_adam import BF16AdamW, rounded


def make(kind: type[torch.optim.AdamW], dtype: torch.dtype, size: int = 200) -> torch.optim.AdamW:
    p = torch.randn(size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    optimizer = kind([p], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1, fused=True)
    moments = {name: torch.zeros(size, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[p] = {"step": torch.zeros(()), **moments}
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), None
    return optimizer


def take(optimizer: torch.optim.AdamW, steps: int, scale: float = 1.0, seed: int = 1) -> None:
    (p,), noise = optimizer.param_groups[0]["params"], torch.Generator().manual_seed(seed)
    for _ in range(steps):
        p.grad = scale * torch.randn(len(p), generator=noise)
        optimizer.step()


def moments(optimizer: torch.optim.AdamW) -> tuple[torch.Tensor, torch.Tensor]:
    (state,) = optimizer.state.values()
    return state["exp_avg"].float(), state["exp_avg_sq"].float()


def test_follows_fp32_where_moments_rise_and_fall() -> None:
    """Of a second moment that falls by less than bf16 can tell in a step, too."""
    ours, theirs = make(BF16AdamW, torch.bfloat16), make(torch.optim.AdamW, torch.float32)
    for steps, scale in ((300, 1.0), (1500, 0.01), (300, 0.3)):
        for optimizer in (ours, theirs):
            take(optimizer, steps, scale)
        (_, square), (_, exact) = moments(ours), moments(theirs)
        assert (square / exact).mean().item() == pytest.approx(1, abs=0.01)
        assert (square / exact - 1).square().mean().sqrt() < 0.03
    (p,), (q,) = (optimizer.param_groups[0]["params"] for optimizer in (ours, theirs))
    start = torch.randn(200, generator=torch.Generator().manual_seed(0))
    assert (p - q).norm() < 0.01 * (q - start).norm()
    (state,) = ours.state.values()
    assert state["exp_avg_sq"].dtype == torch.bfloat16 and state["step"] == 2100


def test_rounds_by_thresholds_that_are_right_in_the_mean() -> None:
    x = torch.tensor([1.0, -1.0, 1 + 1 / 512, -1 - 3 / 512, 1e-30, 0.0])
    lifts = [torch.tensor(math.floor(step * bf16_adam.GOLDEN % 1 * 65536)).int() for step in range(1000)]
    found = torch.stack([rounded(x, lift) for lift in lifts]).double()
    assert torch.equal(found.bfloat16().double(), found)
    torch.testing.assert_close(found.mean(0), x.double(), rtol=1e-5, atol=0)


def test_a_step_that_is_left_out_changes_nothing() -> None:
    optimizer = make(BF16AdamW, torch.bfloat16)
    take(optimizer, 5)
    (p,), before = optimizer.param_groups[0]["params"], moments(optimizer)
    weights = p.detach().clone()
    optimizer.found_inf = torch.ones(())
    take(optimizer, 1, math.inf)
    assert torch.equal(p, weights) and all(map(torch.equal, moments(optimizer), before))
    (state,) = optimizer.state.values()
    assert state["step"] == 5


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(BF16AdamW, torch.bfloat16)
    take(whole, 3)
    monkeypatch.setitem(bf16_adam.PIECES, "cpu", 64)
    parts = make(BF16AdamW, torch.bfloat16)
    take(parts, 3)
    assert all(map(torch.equal, moments(whole), moments(parts)))
    assert torch.equal(*(optimizer.param_groups[0]["params"][0] for optimizer in (whole, parts)))
