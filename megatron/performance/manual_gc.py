"""Garbage collection at the same iterations on all ranks, so that no rank waits for another that collects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.performance.config import PerformanceConfig
from megatron.training.loop import Hook, Trainer


class ManualGC(Hook):
    """Collect garbage at the same iterations on all ranks (--manual-gc)."""

    @contextmanager
    def during_training(self, trainer: Trainer) -> Iterator[None]:
        enabled = trainer.config.plugin(PerformanceConfig).manual_gc
        if enabled:
            gc.collect()
            gc.disable()
        try:
            yield
        finally:
            gc.enable()

    def after_step(self, trainer: Trainer) -> None:
        if trainer.is_due(trainer.config.plugin(PerformanceConfig).manual_gc_interval):
            gc.collect()

    @contextmanager
    def during_evaluation(self, trainer: Trainer) -> Iterator[None]:
        config = trainer.config.plugin(PerformanceConfig)
        collects = config.manual_gc and config.manual_gc_eval
        if collects:
            gc.collect()
        yield
        if collects:
            gc.collect(generation=0)
