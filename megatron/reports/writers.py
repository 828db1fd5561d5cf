"""Writers of reports: a file of metrics, TensorBoard, Weights & Biases."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, TextIO

from megatron.errors import InputError
from megatron.files import read_file
from megatron.reports.config import ReportConfig
from megatron.reports.record import MAX_BYTES, events_file, is_evaluation, read_rows
from megatron.training.config import RunConfig
from megatron.training.report import Interval

# Values of an iteration that are reported as their sum over an interval.
COUNTED = ("skipped", "overflow")


class Writer(ABC):
    """A destination of reports beside the log. To add one, list a subclass in `WRITERS` (`reports/reports.py`)."""

    flag: ClassVar[str]  # the flag that asks for this writer

    @classmethod
    @abstractmethod
    def make(cls, config: RunConfig) -> Writer | None:
        """Return the writer that the flags ask for, if any.

        Raises:
            InputError: a package is not installed.
        """

    @abstractmethod
    def start(self, iteration: int, *, evaluation_due: bool) -> None:
        """Open the destination after `iteration`, and drop what an earlier run reported of anything to come."""

    @abstractmethod
    def training(self, interval: Interval) -> None:
        """Write an interval of training."""

    @abstractmethod
    def evaluation(self, values: dict[str, float], iteration: int, samples: int) -> None:
        """Write values of an evaluation by name."""

    def checkpoint(self, iteration: int) -> None:  # noqa: B027, for a file of events
        """Take note of a checkpoint."""

    def by_rank(self, values: dict[str, dict[str, dict[int, float]]], iteration: int) -> None:  # noqa: B027
        """Write the newest values by rank, by name of a quantity and of a part, such as a phase."""

    def text(self, tag: str, text: str, iteration: int) -> None:  # noqa: B027, some destinations take no texts
        """Write a text, such as a sample."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left."""


class MetricsFile(Writer):
    """The file of --metrics-path: a JSON object per line. A file beside it has events, as the flags of each start."""

    flag = "--metrics-path"

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path, self.config = path, config
        self.file: TextIO | None = None
        self.events: Path | None = None

    @classmethod
    def make(cls, config: RunConfig) -> MetricsFile | None:
        path = config.plugin(ReportConfig).metrics_file(config)
        return None if path is None else cls(path, config)

    def start(self, iteration: int, *, evaluation_due: bool) -> None:
        try:
            path = self.path.resolve()  # follow a link
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.is_file():  # not a pipe, not a device
                text = read_file(path, MAX_BYTES).decode("utf-8") if path.exists() else ""
                # A killed run may have left half a line.
                lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
                # A run that was killed in its last evaluation repeats that.
                last = iteration - evaluation_due
                kept = [
                    line
                    for line in lines
                    if (row := json.loads(line))["iteration"] <= last
                    or (row["iteration"] == iteration and not is_evaluation(row))
                ]
                temporary = path.with_name(f".writing-{path.name}")
                temporary.write_text("".join(kept), encoding="utf-8")
                temporary.rename(path)
                start = {
                    "iteration": iteration,
                    "time": time.time(),
                    "config": dataclasses.asdict(self.config),
                }
                self.events = events_file(path)
                before = read_rows(self.events) if self.events.is_file() else []
                rows = [*(row for row in before if iteration and row["iteration"] <= iteration), start]
                self.events.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115, open until `close`
        except OSError as error:
            raise InputError(f"--metrics-path: {self.path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError):  # the last for nested brackets
            raise InputError(
                f"--metrics-path: {self.path} is not a file of metrics; choose another file"
            ) from None

    def training(self, interval: Interval) -> None:
        self._write(record(interval))

    def evaluation(self, values: dict[str, float], iteration: int, samples: int) -> None:
        self._write({"iteration": iteration, "consumed samples": samples, **values})

    def text(self, tag: str, text: str, iteration: int) -> None:
        self._write({"iteration": iteration, "text": {tag: text}})

    def checkpoint(self, iteration: int) -> None:
        self._add_event({"iteration": iteration, "checkpoint": True})

    def by_rank(self, values: dict[str, dict[str, dict[int, float]]], iteration: int) -> None:
        self._add_event({"iteration": iteration, "by rank": values})

    def _add_event(self, event: dict[str, Any]) -> None:
        if self.events is not None:
            with open(self.events, "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def _write(self, record: dict[str, Any]) -> None:
        if self.file is not None:
            # JSON has neither NaN nor infinity; null stands for both.
            finite = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
            }
            self.file.write(json.dumps(finite) + "\n")
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class TensorBoard(Writer):
    """TensorBoard events (--tensorboard-dir), under NVIDIA's names."""

    flag = "--tensorboard-dir"

    def __init__(self, config: ReportConfig) -> None:
        self.config = config
        self.events: Any = None

    @classmethod
    def make(cls, config: RunConfig) -> TensorBoard | None:
        flags = config.plugin(ReportConfig)
        return None if flags.tensorboard_dir is None else cls(flags)

    def start(self, iteration: int, *, evaluation_due: bool) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("--tensorboard-dir needs TensorBoard: pip install tensorboard") from None
        folder, queue = self.config.tensorboard_dir, self.config.tensorboard_queue_size
        try:
            self.events = SummaryWriter(folder, max_queue=queue, purge_step=iteration + 1)
        except OSError as error:
            raise InputError(f"--tensorboard-dir: {folder}: {error.strerror}") from None

    def training(self, interval: Interval) -> None:
        for point in points(interval):
            iteration, samples = int(point.pop("iteration")), int(point.pop("consumed samples"))
            if iteration % self.config.tensorboard_log_interval == 0 or "learning-rate" in point:
                for name, value in point.items():
                    self.events.add_scalar(name, value, iteration)
                    self.events.add_scalar(f"{name} vs samples", value, samples)

    def evaluation(self, values: dict[str, float], iteration: int, samples: int) -> None:
        for name, value in values.items():
            self.events.add_scalar(name, value, iteration)
            if not name.endswith(" ppl"):
                self.events.add_scalar(f"{name} vs samples", value, samples)

    def text(self, tag: str, text: str, iteration: int) -> None:
        # TensorBoard renders Markdown, in which a block indented by four spaces is shown as it is.
        self.events.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), iteration)

    def close(self) -> None:
        if self.events is not None:
            self.events.close()


def record(interval: Interval) -> dict[str, Any]:
    """Every value at full precision, for --metrics-path and Weights & Biases."""
    last = dict(interval.rows[-1])
    values = {"iteration": last.pop("iteration"), "consumed samples": last.pop("consumed samples")}
    values |= interval.losses | {k: v for k, v in last.items() if k not in (*interval.loss_names, *COUNTED)}
    values |= {
        "learning rate": interval.lr,
        "global batch size": interval.batch_size,
        "skipped iterations": interval.skipped,
    }
    if interval.params_norm is not None:
        values["params norm"] = interval.params_norm
    return values | {"seconds per iteration": interval.seconds} | interval.values


def points(interval: Interval) -> list[dict[str, float]]:
    """Values of each iteration by their names in TensorBoard; the last has those of the interval too."""
    renamed = {"grad norm": "grad-norm", "num zeros": "num-zeros", "loss scale": "loss-scale"}
    values = [{renamed.get(k, k): v for k, v in row.items() if k not in COUNTED} for row in interval.rows]
    values[-1] |= {
        "learning-rate": interval.lr,
        "batch-size": interval.batch_size,
        "iteration-time": interval.seconds,
    }
    throughput = {"tokens per second": "tokens-per-second", "TFLOP/s per device": "throughput"}
    values[-1] |= {throughput.get(name, name): value for name, value in interval.values.items()}
    if interval.params_norm is not None:
        values[-1]["params-norm"] = interval.params_norm
    return values


class WeightsAndBiases(Writer):
    """A run in Weights & Biases (--wandb-project)."""

    flag = "--wandb-project"

    def __init__(self, run: Any) -> None:
        self.run = run

    @classmethod
    def make(cls, config: RunConfig) -> WeightsAndBiases | None:
        flags = config.plugin(ReportConfig)
        if flags.wandb_project is None:
            return None
        try:
            import wandb
        except ImportError:
            raise InputError("--wandb-project needs Weights & Biases: pip install wandb") from None
        run = wandb.init(
            project=flags.wandb_project,
            name=flags.wandb_exp_name,
            entity=flags.wandb_entity,
            config=dataclasses.asdict(config),
        )
        return cls(run)

    def start(self, iteration: int, *, evaluation_due: bool) -> None:
        """Do nothing: the service drops values of earlier steps by itself."""

    def training(self, interval: Interval) -> None:
        values = record(interval)
        self.run.log(values, step=values["iteration"])

    def evaluation(self, values: dict[str, float], iteration: int, samples: int) -> None:
        self.run.log({"iteration": iteration, "consumed samples": samples, **values}, step=iteration)

    def close(self) -> None:
        self.run.finish()
