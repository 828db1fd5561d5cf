"""Tokens and floating-point operations of a run per second, and its use of memory."""

from __future__ import annotations

import logging

import torch

from megatron.model.flops import flops_per_sample
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.stages import split_layers
from megatron.reports.config import ReportConfig
from megatron.reports.devices import find_peak, max_memory, memory_by_rank, memory_lines
from megatron.reports.flops import exact_flops_per_sample
from megatron.reports.reports import Reports
from megatron.training.engine import Engine
from megatron.training.loop import Hook, Trainer
from megatron.training.report import Interval

logger = logging.getLogger("megatron")


class Throughput(Hook):
    """Adds throughput to every report, and logs memory use after the first iteration for --log-level debug."""

    def __init__(self, reports: Reports) -> None:
        """`reports` gets the memory use."""
        self.reports = reports

    def before_training(self, trainer: Trainer) -> None:
        engine = trainer.engine
        self.peak = find_peak(trainer.mesh, engine.ops.matmul, engine.dtype)
        self.first = trainer.state.iteration + 1
        logger.debug(
            f"peak per device: {self.peak.flops / 1e12:.3g} TFLOP/s in {trainer.config.training.precision} "
            f"({self.peak.source})"
        )

    def before_report(self, trainer: Trainer, interval: Interval) -> None:
        seconds, size = interval.seconds * interval.iterations, trainer.mesh.world.size
        tokens, flops, exact_flops = take_work(trainer.engine)
        tflops, mfu = flops / seconds / size / 1e12, flops / (size * seconds * self.peak.flops)
        interval.values |= {
            "tokens per second": tokens / seconds,
            "TFLOP/s per device": tflops,
            "mfu": mfu,  # model FLOP utilization: FLOP/s over the device's peak
            "hfu": exact_flops / (size * seconds * self.peak.flops),  # with recomputed operations
        }
        if trainer.config.plugin(ReportConfig).log_memory_to_tensorboard:
            interval.values |= max_memory(trainer.mesh)

    def after_step(self, trainer: Trainer) -> None:
        if trainer.state.iteration == self.first:
            use = memory_by_rank(trainer.mesh)
            logger.debug(memory_lines(use, self.first))
            self.reports.by_rank["memory after the first iteration, bytes"] = use


def take_work(engine: Engine) -> tuple[float, float, float]:
    """Work of all replicas since the last call. Every process must call it.

    Returns:
        tokens, including padding; floating-point operations by the paper's formula; and the exact number.
    """
    model, context = engine.config.model, engine.model.context
    stages = split_layers(engine.config.parallel, model.num_layers)
    sums = torch.zeros(3, dtype=torch.float64)
    for (seq_length, num_logits), count in engine.samples.items():
        shape = {
            "seq_length": seq_length,
            "padded_vocab_size": context.padded_vocab_size,
            "num_logits": num_logits,
        }
        exact = exact_flops_per_sample(
            model,
            **shape,
            causal=engine.task.causal,
            recompute=context.recompute,
            chunks=[chunk.layers for stage in stages for chunk in stage],
        )
        sums += count * torch.tensor(
            [seq_length, flops_per_sample(model, **shape), exact], dtype=torch.float64
        )
    engine.samples.clear()
    tokens, flops, exact = all_reduce_sum(sums.to(engine.mesh.device), engine.mesh.dp).tolist()
    return tokens, flops, exact
