"""The log: what a run is about to do, and its lines on training and evaluations."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron.checkpoint.config import SAVE_MINUTES
from megatron.parallel.mesh import Mesh
from megatron.reports.config import ReportConfig
from megatron.reports.flops import unused_parameters
from megatron.reports.layout import describe_layout, layout_line
from megatron.reports.log_formats import LOG_FORMATS
from megatron.training.loop import Hook, Trainer
from megatron.training.report import EvalResult, Interval

logger = logging.getLogger("megatron")


class LogLines(Hook):
    """Logs the run at its start, and then its training and evaluations in --log-format."""

    def during_run(self, trainer: Trainer) -> AbstractContextManager[object]:
        self.format = LOG_FORMATS[trainer.config.plugin(ReportConfig).log_format]
        trainer.log("\n".join(describe(trainer)))
        logger.debug(describe_layout(trainer.engine))
        return nullcontext()

    def after_report(self, trainer: Trainer, interval: Interval) -> None:
        trainer.log(self.format.training(trainer, interval))

    def after_evaluation(self, trainer: Trainer, result: EvalResult) -> None:
        trainer.log(self.format.evaluation(trainer, result))


def describe(trainer: Trainer) -> Iterator[str]:
    """Yield lines on the model, the layout, the device, the checkpoints, and the iterations to come."""
    config, state, mesh = trainer.config, trainer.state, trainer.mesh
    model, training, checkpoint = config.model, config.training, config.checkpoint
    layers = f"{model.num_layers} layer{'s' if model.num_layers > 1 else ''}"
    total, active, experts = trainer.engine.buffer.num_elements, "", ""
    if model.num_experts is not None:
        active = f", {total - unused_parameters(model):,} active"
        experts = f"{model.num_experts} experts, {model.moe_router_topk} of them for each token, "
    yield (
        f"model: {trainer.task.name}, {total:,} parameters{active}; {layers}, "
        f"hidden size {model.hidden_size:,}, {model.num_attention_heads} heads, {experts}"
        f"vocabulary {trainer.tokenizer.vocab_size:,}"
    )
    yield f"layout: {layout_line(trainer.engine)}"
    yield f"device: {_device(mesh)}, {training.precision}"
    if training.skip_train:
        yield f"evaluation of {checkpoint.load}, iteration {state.iteration}; nothing is trained (--skip-train)"
        return
    every = (
        f"{checkpoint.save_interval} iterations" if checkpoint.save_interval else f"{SAVE_MINUTES} minutes"
    )
    yield "checkpoints: " + (
        "without --save DIR no checkpoint of this run will be kept"
        if checkpoint.save is None
        else f"{checkpoint.save}, every {every} and at the end"
    )
    if trainer.is_done:
        return
    begin = ""
    if checkpoint.load is not None and checkpoint.finetune:
        begin = f", from the weights of {checkpoint.load}"
    elif checkpoint.load is not None and state.iteration:
        begin = f", resumed from {checkpoint.load} at iteration {state.iteration}"
    elif checkpoint.load is not None:
        begin = f"; {checkpoint.load} holds no checkpoint yet"
    yield (
        f"training: iterations {state.iteration + 1} to {trainer.train_iters} of "
        f"{trainer.batch_schedule.global_batch_size:,} samples{begin}"
    )


def _device(mesh: Mesh) -> str:
    if mesh.device.type == "cuda":
        return torch.cuda.get_device_name(mesh.device)
    threads = torch.get_num_threads()
    return f"{mesh.device.type}, {threads} thread{'s' if threads > 1 else ''} per process"
