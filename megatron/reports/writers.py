"""Writers of reports: the interface, the file of metrics, and TensorBoard."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TextIO

from megatron.errors import InputError
from megatron.reports.config import ReportConfig
from megatron.reports.interval import mean_losses, num_skipped
from megatron.reports.record import DATA_PHASE, EXPERTS, events_file, is_evaluation, readable_lines
from megatron.training.config import RunConfig
from megatron.training.report import Interval

# Values of an iteration that are reported as their sum over an interval.
COUNTED = ("skipped", "overflow")


PROBE_BYTES = 1 << 14  # written to see if a disk has space for TensorBoard's events
SAMPLES_FOLDER = "vs-samples"  # in --tensorboard-dir
# Tag of the run's configuration as text.
CONFIGURATION = "configuration"


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
    def start(self, iteration: int, samples: int, *, evaluation_due: bool) -> None:
        """Open the destination after `iteration`, and drop what an earlier run reported of anything to come.

        Args:
            samples: consumed after `iteration`.
        """

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

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Write what is left. With `failed` an error ended the run."""

    def text(self, tag: str, text: str, iteration: int) -> None:  # noqa: B027, for files of numbers
        """Write a text, such as the configuration or a sample of the model, if the destination has texts.

        Args:
            tag: name, as "sample 1". Texts of one tag follow one another by iteration.
            text: shown as it is, in a font of fixed width.
        """


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

    def start(self, iteration: int, samples: int, *, evaluation_due: bool) -> None:
        try:
            path = self.path.resolve()  # follow a link
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.is_file():  # not a pipe, not a device
                # A run that was killed in its last evaluation repeats that.
                last = iteration - evaluation_due
                kept = [
                    line
                    for line, row in readable_lines(path)
                    if row["iteration"] <= last or (row["iteration"] == iteration and not is_evaluation(row))
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
                before = [row for _, row in readable_lines(self.events)]
                rows = [*(row for row in before if iteration and row["iteration"] <= iteration), start]
                self.events.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115, open until `close`
        except OSError as error:
            raise InputError(f"--metrics-path: {self.path}: {error.strerror}") from None

    def training(self, interval: Interval) -> None:
        self._write(record(interval))

    def evaluation(self, values: dict[str, float], iteration: int, samples: int) -> None:
        self._write({"iteration": iteration, "consumed samples": samples, **values})

    def text(self, tag: str, text: str, iteration: int) -> None:
        if tag != CONFIGURATION:  # the other file has the flags
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

    def close(self, *, failed: bool) -> None:
        if self.file is not None:
            self.file.close()


class Point(NamedTuple):
    """Values by tag of one iteration, after which the run had consumed `samples`."""

    iteration: int
    samples: int
    values: dict[str, float]


class Tracker(Writer):
    """A writer of numbers by tag, such as "train/lm loss", and of texts.

    Attributes:
        every: iterations between points; the last iteration of an interval always has one.
    """

    every = 1

    @abstractmethod
    def write(self, points: Sequence[Point]) -> None:
        """Write values by tag."""

    def training(self, interval: Interval) -> None:
        last = interval.rows[-1]["iteration"]
        self.write([p for p in points(interval) if p.iteration % self.every == 0 or p.iteration == last])

    def evaluation(self, values: dict[str, float], iteration: int, samples: int) -> None:
        self.write([Point(iteration, samples, {evaluation_tag(name): x for name, x in values.items()})])


class TensorBoard(Tracker):
    """TensorBoard events (--tensorboard-dir).

    Values by consumed samples are in a folder of their own. A resume removes events from a step on, whatever their tag,
    and so needs one kind of step in a folder.
    """

    flag = "--tensorboard-dir"

    def __init__(self, config: ReportConfig) -> None:
        self.config, self.every = config, config.tensorboard_log_interval
        self.events: Any = None
        self.events_by_samples: Any = None

    @classmethod
    def make(cls, config: RunConfig) -> TensorBoard | None:
        flags = config.plugin(ReportConfig)
        return None if flags.tensorboard_dir is None else cls(flags)

    def start(self, iteration: int, samples: int, *, evaluation_due: bool) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("--tensorboard-dir needs TensorBoard: pip install tensorboard") from None
        folder, queue = self.config.tensorboard_dir, self.config.tensorboard_queue_size
        try:
            if folder is not None and "://" not in folder:
                # TensorBoard writes in a thread, which would print a traceback if the disk is full.
                Path(folder).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder) as file:
                    file.write(bytes(PROBE_BYTES))
            self.events = SummaryWriter(folder, max_queue=queue, purge_step=iteration + 1)
            self.events_by_samples = SummaryWriter(
                f"{folder}/{SAMPLES_FOLDER}", max_queue=queue, purge_step=samples + 1
            )
        except OSError as error:
            raise InputError(f"--tensorboard-dir: {folder}: {error.strerror}") from None

    def write(self, points: Sequence[Point]) -> None:
        for iteration, samples, values in points:
            for tag, value in values.items():
                self.events.add_scalar(tag, value, iteration)
                if not tag.endswith(" ppl"):
                    self.events_by_samples.add_scalar(f"{tag} vs samples", value, samples)

    def text(self, tag: str, text: str, iteration: int) -> None:
        # TensorBoard renders Markdown, in which a block indented by four spaces is shown as it is.
        self.events.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), iteration)

    def close(self, *, failed: bool) -> None:
        for events in (self.events, self.events_by_samples):
            if events is not None:
                events.close()


def record(interval: Interval) -> dict[str, Any]:
    """Every value at full precision, for --metrics-path and Weights & Biases."""
    last = dict(interval.rows[-1])
    values = {"iteration": last.pop("iteration"), "consumed samples": last.pop("consumed samples")}
    values |= mean_losses(interval) | {
        k: v for k, v in last.items() if k not in (*interval.loss_names, *COUNTED)
    }
    values |= {
        "learning rate": interval.lr,
        "global batch size": interval.batch_size,
        "skipped iterations": num_skipped(interval),
    }
    return values | {"seconds per iteration": interval.seconds} | interval.values


# Group and name of a value in trackers, by its name here. Other values of training are speeds.
TAGS = {
    "grad norm": "optimizer/grad-norm",
    "num zeros": "optimizer/num-zeros",
    "loss scale": "optimizer/loss-scale",
    "params norm": "optimizer/params-norm",
    "learning rate": "optimizer/learning-rate",
    "global batch size": "optimizer/batch-size",
    DATA_PHASE: "data/phase",
    "skipped iterations": "optimizer/skipped-iterations",
    "seconds per iteration": "speed/iteration-time",
    "tokens per second": "speed/tokens-per-second",
    "TFLOP/s per device": "speed/throughput",
}


def tag_of(name: str) -> str:
    """The tag of a value of training."""
    if name.startswith(EXPERTS):
        return f"{EXPERTS.strip()}/{name.removeprefix(EXPERTS).replace(' ', '-')}"
    return f"train/{name}" if name.endswith("loss") else TAGS.get(name, f"speed/{name}")


def evaluation_tag(name: str) -> str:
    """The tag of a value of an evaluation: "valid/lm loss ppl" of "lm loss validation ppl"."""
    words = name.split()
    split = next((word for word in words if word in ("validation", "test")), None)
    group = "test" if split == "test" else "valid"
    return f"{group}/{' '.join(word for word in words if word != split)}"


def points(interval: Interval) -> list[Point]:
    """Values of each iteration by tag; the last has those of the interval too."""
    rows = [{k: v for k, v in row.items() if k not in COUNTED} for row in interval.rows]
    rows[-1] |= {k: v for k, v in record(interval).items() if k not in interval.loss_names}
    return [
        Point(
            int(row.pop("iteration")),
            int(row.pop("consumed samples")),
            {tag_of(name): value for name, value in row.items()},
        )
        for row in rows
    ]
