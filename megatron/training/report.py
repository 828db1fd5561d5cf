"""Values of a run's iterations and evaluations, and its log."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import Mesh


def show_log(mesh: Mesh, level: str) -> None:
    """Send the package's log to stdout: from `level` on from the first process, warnings and errors from every one."""
    handler = logging.StreamHandler(sys.stdout)
    handler.handleError = lambda _: None  # type: ignore # `Log` reports a full disk
    handler.setLevel(level.upper() if mesh.is_first else logging.WARNING)
    logger = logging.getLogger("megatron")
    logger.handlers = [handler]
    logger.setLevel(level.upper())


class History:
    """Losses and statistics of every iteration since the last log line.

    Values stay on the device until they are collected, so that adding them does not block the host. Checkpoints hold
    the rows, so that the first log line after a resume averages the same iterations.

    Attributes:
        rows: one dict per iteration: "iteration", "consumed samples", and each value by its name.
        faulty: those of the last collected iterations in which this process's share of the loss was not finite.
    """

    def __init__(self, loss_names: tuple[str, ...], rows: list[dict[str, float]]) -> None:
        self.loss_names = loss_names
        self.rows = rows
        self.faulty: list[float] = []
        self.pending: list[tuple[dict[str, float], Tensor, dict[str, Tensor]]] = []

    def add(self, iteration: int, consumed_samples: int, losses: Tensor, stats: dict[str, Tensor]) -> None:
        """Add an iteration: [terms] this process's share of the mean losses, and statistics equal on all processes."""
        self.pending.append(({"iteration": iteration, "consumed samples": consumed_samples}, losses, stats))

    def collect(self, mesh: Mesh) -> list[dict[str, float]]:
        """Move pending iterations to `rows` and return them. Blocks the host; every process must call it."""
        if not self.pending:
            return []
        rows = [row for row, _, _ in self.pending]
        shares = torch.stack([losses for _, losses, _ in self.pending])
        finite = shares.isfinite().all(1).tolist()
        self.faulty = [row["iteration"] for row, good in zip(rows, finite, strict=True) if not good]
        losses = all_reduce_sum(shares, mesh.dp_cp, mesh.pp).tolist()
        stats = torch.stack([torch.stack(list(stats.values())) for _, _, stats in self.pending]).tolist()
        for row, loss_row, stats_row, (_, _, named) in zip(rows, losses, stats, self.pending, strict=True):
            row.update(zip(self.loss_names, loss_row, strict=True))
            row.update(zip(named, stats_row, strict=True))
        self.pending.clear()
        self.rows += rows
        return rows

    def take(self) -> list[dict[str, float]]:
        """Return the rows and forget them."""
        rows, self.rows = self.rows, []
        return rows


@dataclasses.dataclass(kw_only=True)
class Interval:
    """The iterations between two log lines.

    Attributes:
        rows: from `History`, with those before a resume since the last log line.
        iterations: number of iterations of this run.
        seconds: per iteration.
        values: what hooks add for reports, by name.
    """

    rows: list[dict[str, float]]
    loss_names: tuple[str, ...]
    train_iters: int
    lr: float
    batch_size: int
    iterations: int
    seconds: float
    values: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Results of an evaluation.

    Attributes:
        title: what was evaluated, such as "validation" or the name of a zero-shot task.
        where: point of the run, in Megatron-LM's words.
        values: by name, for metrics.
        line: log line in Megatron-LM's format, if it is not that of losses.
    """

    title: str
    where: str
    values: dict[str, float]
    line: str | None = None


class Log:
    """Prints lines on the first process, and nothing on the others.

    Attributes:
        write: prints a line. A progress bar replaces it, to print above itself.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.active = mesh.is_first
        self.write: Callable[[str], None] = functools.partial(print, flush=True)

    def __call__(self, text: str) -> None:
        if self.active:
            try:
                self.write(text)
            except OSError as error:
                # The reader of our output (head, tee, a terminal) is gone, or its disk is full. The run continues.
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115, open until the process exits
                with suppress(OSError):
                    sys.stderr.write(f"standard output: {error.strerror}; the run continues without it\n")
