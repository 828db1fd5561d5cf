"""Learning rate and weight decay as functions of the number of samples consumed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from megatron.errors import InputError
from megatron.optim.config import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedules of a run, saved in checkpoints. All lengths are in samples.

    Attributes:
        decay: samples until the end of the decay, warm-up included.
        wsd_decay: samples of the last phase of WSD.
        train_samples: samples over which weight decay changes.
    """

    max_lr: float
    min_lr: float
    init_lr: float
    warmup: float
    decay: int
    decay_style: str
    wsd_decay: int
    wsd_decay_style: str
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_style: str
    train_samples: int

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

    def lr(self, consumed_samples: int) -> float:
        """Learning rate of the step after `consumed_samples`."""
        if self.warmup and consumed_samples <= self.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * consumed_samples / self.warmup
        if self.decay_style == "constant":
            return self.max_lr
        if consumed_samples > self.decay:
            return self.min_lr
        if self.decay_style in LR_DECAYS:
            return LR_DECAYS[self.decay_style](self, consumed_samples)
        progress = (consumed_samples - self.warmup) / (self.decay - self.warmup)
        share = {"linear": 1 - progress, "cosine": 0.5 * (math.cos(math.pi * progress) + 1)}[self.decay_style]
        return self.min_lr + (self.max_lr - self.min_lr) * share

    def weight_decay(self, consumed_samples: int) -> float:
        """Weight decay of the step after `consumed_samples`."""
        start, span = self.start_weight_decay, self.end_weight_decay - self.start_weight_decay
        progress = min(1.0, consumed_samples / self.train_samples)
        if self.weight_decay_style == "cosine":
            progress = 0.5 * (math.cos(math.pi * (1 - progress)) + 1)
        return start + span * progress


# Learning rate between warm-up and end of the decay, by --lr-decay-style. Filled by `megatron.plugins`.
LR_DECAYS: dict[str, Callable[[Schedule, int], float]] = {}
