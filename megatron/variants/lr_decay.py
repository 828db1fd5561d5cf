"""Decays of the learning rate other than the linear and the cosine one."""

from __future__ import annotations

import math

from megatron.optim.schedule import Schedule


def inverse_square_root(schedule: Schedule, n: int) -> float:
    """Learning rate after `n` samples, proportional to 1 / sqrt(n), as in arXiv 1706.03762."""
    return max(schedule.min_lr, schedule.max_lr * math.sqrt(max(schedule.warmup, 1) / max(n, 1)))


def warmup_stable_decay(schedule: Schedule, n: int) -> float:
    """Learning rate after `n` samples: constant until the last `wsd_decay` samples (arXiv 2404.06395)."""
    progress = max(0.0, (n - schedule.decay + schedule.wsd_decay) / schedule.wsd_decay)
    share = {
        "exponential": 2 * 0.5**progress - 1,
        "linear": 1 - progress,
        "cosine": 0.5 * (math.cos(math.pi * progress) + 1),
        "minus_sqrt": 1 - math.sqrt(progress),
    }[schedule.wsd_decay_style]
    return schedule.min_lr + (schedule.max_lr - schedule.min_lr) * share


LR_DECAYS = {"inverse-square-root": inverse_square_root, "WSD": warmup_stable_decay}
