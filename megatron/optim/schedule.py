"""Learning rate and weight decay as functions of the number of samples consumed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron.errors import InputError
from megatron.optim.config import OptimizerConfig


def set_by(flags: str) -> Any:
    """Make a field of a schedule; `flags` name, for messages, what it follows from."""
    return dataclasses.field(metadata={"flags": flags})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedules of a run, saved in checkpoints. All lengths are in samples.

    Attributes:
        decay: samples until the end of the decay, warm-up included.
        wsd_decay: samples of the last phase of WSD.
        train_samples: samples over which weight decay changes.
    """

    max_lr: float = set_by("--lr")
    min_lr: float = set_by("--min-lr")
    init_lr: float = set_by("--lr-warmup-init")
    warmup: float = set_by("warm-up samples (--lr-warmup-iters, -samples, -fraction)")
    decay: int = set_by("decay samples (--lr-decay-iters, -samples, --train-iters, -samples)")
    decay_style: str = set_by("--lr-decay-style")
    wsd_decay: int = set_by("samples of the last phase of WSD (--lr-wsd-decay-iters, -samples)")
    wsd_decay_style: str = set_by("--lr-wsd-decay-style")
    start_weight_decay: float = set_by("weight decay at the start (--weight-decay, --start-weight-decay)")
    end_weight_decay: float = set_by("weight decay at the end (--weight-decay, --end-weight-decay)")
    weight_decay_style: str = set_by("--weight-decay-incr-style")
    train_samples: int = set_by("training samples (--train-iters, --train-samples)")

    @classmethod
    def from_config(cls, config: OptimizerConfig, *, global_batch_size: int, train_samples: int) -> Schedule:
        """Build the schedules that the flags describe, with iterations of `global_batch_size` samples.

        Raises:
            InputError: the lengths contradict each other.
        """

        def samples(iters: int | None, in_samples: int | None) -> int | None:
            return in_samples or (iters * global_batch_size if iters else None)

        decay = samples(config.lr_decay_iters, config.lr_decay_samples) or train_samples
        if config.lr_warmup_fraction is not None:
            warmup = config.lr_warmup_fraction * decay
        else:
            warmup = samples(config.lr_warmup_iters, config.lr_warmup_samples) or 0
        if warmup > decay or (warmup == decay and config.lr_decay_style != "constant"):
            raise InputError(
                f"the learning rate's warm-up of {warmup:g} samples must be shorter than its decay of {decay} samples; "
                "shorten the warm-up (--lr-warmup-iters, -samples or -fraction) or lengthen the decay "
                "(--lr-decay-iters or -samples)"
            )
        wsd_decay = samples(config.lr_wsd_decay_iters, config.lr_wsd_decay_samples) or 0
        if config.lr_decay_style == "WSD" and not 0 < wsd_decay <= decay - warmup:
            raise InputError(
                f"--lr-decay-style WSD: its last phase, --lr-wsd-decay-iters or -samples, has {wsd_decay} samples; it "
                f"must have 1 to {decay - warmup:g}, those between warm-up and end of decay"
            )
        start_weight_decay, end_weight_decay = config.start_weight_decay, config.end_weight_decay
        if start_weight_decay is None or end_weight_decay is None:
            start_weight_decay = end_weight_decay = config.weight_decay
        return cls(
            max_lr=config.lr,
            min_lr=config.min_lr,
            init_lr=config.lr_warmup_init,
            warmup=warmup,
            decay=decay,
            decay_style=config.lr_decay_style,
            wsd_decay=wsd_decay,
            wsd_decay_style=config.lr_wsd_decay_style,
            start_weight_decay=start_weight_decay,
            end_weight_decay=end_weight_decay,
            weight_decay_style=config.weight_decay_incr_style,
            train_samples=train_samples,
        )

    def differences(self, other: Schedule) -> list[str]:
        """Describe each difference from another schedule: the flag, this value and the other."""
        rows = [
            (f.metadata["flags"], vars(self)[f.name], vars(other)[f.name]) for f in dataclasses.fields(self)
        ]
        return [f"{flags} changed from {mine} to {theirs}" for flags, mine, theirs in rows if mine != theirs]

    def lr(self, consumed_samples: int) -> float:
        """Learning rate of the step after `consumed_samples`."""
        n, span = consumed_samples, self.max_lr - self.min_lr
        if self.warmup and n <= self.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * n / self.warmup
        if self.decay_style == "constant":
            return self.max_lr
        if n > self.decay:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1) / max(n, 1)))
        if self.decay_style == "WSD":
            return self.min_lr + span * self._wsd_share(n)
        progress = (n - self.warmup) / (self.decay - self.warmup)
        share = 1 - progress if self.decay_style == "linear" else 0.5 * (math.cos(math.pi * progress) + 1)
        return self.min_lr + span * share

    def _wsd_share(self, n: int) -> float:
        start = self.decay - self.wsd_decay
        if n <= start:
            return 1.0
        progress = (n - start) / self.wsd_decay
        return {
            "exponential": 2 * 0.5**progress - 1,
            "linear": 1 - progress,
            "cosine": 0.5 * (math.cos(math.pi * progress) + 1),
            "minus_sqrt": 1 - math.sqrt(progress),
        }[self.wsd_decay_style]

    def weight_decay(self, consumed_samples: int) -> float:
        """Weight decay of the step after `consumed_samples`."""
        start, span = self.start_weight_decay, self.end_weight_decay - self.start_weight_decay
        progress = min(1.0, consumed_samples / self.train_samples)
        if self.weight_decay_style == "cosine":
            progress = 0.5 * (math.cos(math.pi * (1 - progress)) + 1)
        return start + span * progress
