"""Adam with bf16 moments against torch's with fp32 moments."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.optim.adamw import adamw

from megatron.optim import bf16_adam
from megatron.optim.bf16_adam import bf16_adamw, rounded


class Adam:
    """Parameters updated by one of the two implementations."""

    def __init__(self, function: Callable[..., None], dtype: torch.dtype, size: int = 200) -> None:
        self.function = function
        self.p = torch.randn(size, generator=torch.Generator().manual_seed(0))
        self.mean, self.square = torch.zeros(2, size, dtype=dtype)
        self.count = torch.zeros(())

    def take(self, steps: int, scale: float = 1.0, found_inf: float = 0.0) -> None:
        noise = torch.Generator().manual_seed(1)
        for _ in range(steps):
            grad = scale * torch.randn(len(self.p), generator=noise)
            self.function(
                [self.p],
                [grad],
                [self.mean],
                [self.square],
                [],
                [self.count],
                lr=1e-3,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=0.1,
                amsgrad=False,
                maximize=False,
                fused=True,
                found_inf=torch.tensor(found_inf),
            )

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mean.float(), self.square.float()


def test_tracks_fp32_while_moments_rise_and_fall() -> None:
    """The second moment also decays by less than the bf16 resolution per step."""
    ours, theirs = Adam(bf16_adamw, torch.bfloat16), Adam(adamw, torch.float32)
    start = ours.p.clone()
    for steps, scale in ((300, 1.0), (1500, 0.01), (300, 0.3)):
        for optimizer in (ours, theirs):
            optimizer.take(steps, scale)
        (_, square), (_, exact) = ours.moments(), theirs.moments()
        assert (square / exact).mean().item() == pytest.approx(1, abs=0.01)
        assert (square / exact - 1).square().mean().sqrt() < 0.03
    assert (ours.p - theirs.p).norm() < 0.01 * (theirs.p - start).norm()
    assert ours.square.dtype == torch.bfloat16 and ours.count == 2100


def test_rounding_is_unbiased() -> None:
    x = torch.tensor([1.0, -1.0, 1 + 1 / 512, -1 - 3 / 512, 1e-30, 0.0])
    lifts = [torch.tensor(math.floor(step * bf16_adam.GOLDEN % 1 * 65536)).int() for step in range(1000)]
    found = torch.stack([rounded(x, lift) for lift in lifts]).double()
    assert torch.equal(found.bfloat16().double(), found)
    torch.testing.assert_close(found.mean(0), x.double(), rtol=1e-5, atol=0)


def test_a_skipped_step_changes_nothing() -> None:
    optimizer = Adam(bf16_adamw, torch.bfloat16)
    optimizer.take(5)
    weights, before = optimizer.p.clone(), [x.clone() for x in optimizer.moments()]
    optimizer.take(1, math.inf, found_inf=1.0)
    assert torch.equal(optimizer.p, weights) and all(map(torch.equal, optimizer.moments(), before))
    assert optimizer.count == 5


def test_chunk_size_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunked = (Adam(bf16_adamw, torch.bfloat16) for _ in range(2))
    whole.take(3)
    monkeypatch.setitem(bf16_adam.CHUNK_SIZE, "cpu", 64)
    chunked.take(3)
    assert all(map(torch.equal, whole.moments(), chunked.moments()))
    assert torch.equal(whole.p, chunked.p)
