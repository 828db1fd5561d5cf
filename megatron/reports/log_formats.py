"""Formats of the log's lines on training and evaluations (--log-format)."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron.reports.interval import mean_losses, num_bad, num_skipped
from megatron.reports.record import DATA_PHASE

if TYPE_CHECKING:  # the command line lists the formats, and imports no torch
    from megatron.training.loop import Trainer
    from megatron.training.report import EvalResult, Interval

MAX_COLUMNS = 119  # of a line of the short format
# Megatron-LM logs perplexities up to e to the power of this; a > marks the others.
MAX_LOG_PPL = 20.0


class LogFormat(ABC):
    """Format of log lines. To add one, list a subclass in `LOG_FORMATS`."""

    @abstractmethod
    def training(self, trainer: Trainer, interval: Interval) -> str:
        """Return the text on the iterations since the last log line."""

    @abstractmethod
    def evaluation(self, trainer: Trainer, result: EvalResult) -> str:
        """Return the text on an evaluation."""


class Short(LogFormat):
    """One line of less than 120 columns for people, and a second one for what is unusual."""

    def training(self, trainer: Trainer, interval: Interval) -> str:
        last, values = interval.rows[-1], interval.values
        left = (interval.train_iters - last["iteration"]) * interval.seconds
        columns = [
            *_position(trainer),
            *_losses(mean_losses(interval)),
            f"grad norm {_fixed(last['grad norm'], 3)}",
            f"lr {interval.lr:.2e}",
            f"{_count(values['tokens per second'])} tokens/s",
            f"MFU {values['mfu']:.1%}",
            f"ETA {_duration(left)}",
        ]
        if skipped := num_skipped(interval):
            columns.append(f"skipped {skipped} of {len(interval.rows)}")
        if bad := num_bad(interval):
            columns.append(f"not finite {bad}")
        if "loss scale" in last:
            columns.append(f"loss scale {last['loss scale']:g}")
        if len(set(trainer.batch_schedule.sizes())) > 1:
            columns.append(f"batch size {interval.batch_size:,}")
        if DATA_PHASE in values:
            columns.append(f"{DATA_PHASE} {values[DATA_PHASE]:.0f}")
        if "params norm" in values:
            columns.append(f"params norm {_fixed(values['params norm'], 3)}")
        if "num zeros" in last:
            columns.append(f"zeros {_count(last['num zeros'])}")
        if "moe load max/mean" in values:
            columns.append(f"expert load {values['moe load max/mean']:.2f} of mean")
        if values.get("moe dropped share"):
            columns.append(f"dropped {values['moe dropped share']:.1%}")
        return _lines(columns)

    def evaluation(self, trainer: Trainer, result: EvalResult) -> str:
        columns: list[str] = []
        losses = trainer.task.loss_names
        for name, value in result.values.items():
            words = " ".join(word for word in name.split() if word != result.title)
            if len(losses) == 1 and words.startswith(losses[0]):
                words = {"": "loss", " ppl": "perplexity"}.get(words.removeprefix(losses[0]), words)
            over = words.endswith(("ppl", "perplexity")) and value >= math.exp(MAX_LOG_PPL)
            columns.append(f"{words} {'>' * over}{_fixed(value, 4 if abs(value) < 100 else 1)}")
        columns[0] = f"{result.title} {columns[0]}"
        return _lines([*_position(trainer), *columns])


def _position(trainer: Trainer) -> tuple[str, str]:
    total = str(trainer.train_iters)
    return time.strftime("%H:%M:%S"), f"{trainer.state.iteration:{len(total)}}/{total}"


def _losses(losses: dict[str, float]) -> Iterable[str]:
    """A column per loss. One loss is "loss", several lose the word in their names, such as "lm" and "sop"."""
    for name, loss in losses.items():
        yield f"{'loss' if len(losses) == 1 else name.removesuffix(' loss')} {_fixed(loss, 4)}"


def _lines(columns: Iterable[str]) -> str:
    """Join columns to a line. Those that do not fit go to a second, indented line."""
    lines = [""]
    for column in columns:
        longer = f"{lines[-1]}  {column}" if lines[-1] else column
        if len(longer) <= MAX_COLUMNS:
            lines[-1] = longer
        else:
            lines.append(" " * len("00:00:00  ") + column)
    return "\n".join(lines)


def _fixed(value: float, digits: int) -> str:
    """A number with some digits after the point, or in scientific notation if that is long."""
    return f"{value:.2e}" if 1e6 <= abs(value) < math.inf else f"{value:.{digits}f}"


def _count(value: float) -> str:
    """A number with commas, or from a hundred thousand on with three digits and a unit, as 12.3M."""
    if not value >= 1e5:
        return f"{value:,.0f}"
    units = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
    unit, size = next((u, s) for u, s in units if value >= 0.9995 * s)  # 999,900 is rounded to 1M
    return f"{value / size:.3g}{unit}"


def _duration(seconds: float) -> str:
    """Seconds in two units: 12s, 4m05s, 1h02m or 3d04h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


class Megatron(LogFormat):
    """Lines of Megatron-LM v2.5, byte for byte, for scripts that parse them."""

    def training(self, trainer: Trainer, interval: Interval) -> str:
        last = interval.rows[-1]
        parts = [
            f" iteration {last['iteration']:8d}/{interval.train_iters:8d}",
            f"consumed samples: {last['consumed samples']:12d}",
            f"elapsed time per iteration (ms): {1000 * interval.seconds:.1f}",
            f"learning rate: {interval.lr:.3E}",
            f"global batch size: {interval.batch_size:5d}",
            *(f"{name}: {loss:.6E}".replace("NAN", "nan") for name, loss in mean_losses(interval).items()),
            f"loss scale: {last.get('loss scale', 1.0):.1f}",
            f"grad norm: {last['grad norm']:.3f}",
        ]
        if "num zeros" in last:
            parts.append(f"num zeros: {last['num zeros']:.1f}")
        if "params norm" in interval.values:
            parts.append(f"params norm: {interval.values['params norm']:.3f}")
        parts += [
            f"number of skipped iterations: {num_skipped(interval):3d}",
            f"number of nan iterations: {num_bad(interval):3d}",
        ]
        return " | ".join(parts) + " |"

    def evaluation(self, trainer: Trainer, result: EvalResult) -> str:
        line = result.line or self._losses(result)
        return "\n".join(["-" * len(line), line, "-" * len(line)])

    def _losses(self, result: EvalResult) -> str:
        line = f" validation loss at {result.where} | "
        for key, value in result.values.items():
            name, ppl = key.replace(f" {result.title}", "").removesuffix(" ppl"), key.endswith(" ppl")
            over = ">" * (ppl and value >= math.exp(MAX_LOG_PPL))
            line += f"{name} {'PPL' if ppl else 'value'}: {over}{value:.6E} | "
        return line


LOG_FORMATS: dict[str, LogFormat] = {"short": Short(), "megatron": Megatron()}
