"""Norm of the parameters in the log (--log-params-norm)."""

from __future__ import annotations

from megatron.optim.norms import flat_norm, model_sum
from megatron.reports.config import ReportConfig
from megatron.training.loop import Hook, Trainer
from megatron.training.report import Interval


class ParamsNorm(Hook):
    """Add the L2 norm of all parameters to each report."""

    def before_report(self, trainer: Trainer, interval: Interval) -> None:
        if trainer.config.plugin(ReportConfig).log_params_norm:
            trainer.engine.optimizer.finish()
            buffer = trainer.engine.buffer
            device = buffer.mesh.device  # master weights may be in host memory
            square = model_sum(
                buffer.masters, buffer.buckets, buffer.mesh, lambda x: flat_norm(x).square().to(device)
            )
            interval.values["params norm"] = square.sqrt().float().item()
