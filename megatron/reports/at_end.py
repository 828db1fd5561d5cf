"""The report that a run leaves in its --save folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.reports.config import ReportConfig
from megatron.reports.page import report_page
from megatron.reports.record import read_record
from megatron.training.config import RunConfig
from megatron.training.loop import Hook, Trainer

REPORT = "report.html"
MIN_LOG_LINES = 10  # shorter runs get no page


class ReportAtEnd(Hook):
    """Write report.html into --save when the run ends or stops, from its --metrics-path."""

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        yield
        if trainer.mesh.is_first:
            line = write_report(trainer.config)
            if line is not None:
                trainer.log(line)


def write_report(config: RunConfig) -> str | None:
    """Write the report, if the run has something to show. Returns a line for the log."""
    metrics, save = config.plugin(ReportConfig).metrics_file(config), config.checkpoint.save
    if metrics is None or save is None or not metrics.is_file():
        return None
    page = Path(save) / REPORT
    try:
        run = read_record(metrics)
        if len(run.training) < MIN_LOG_LINES:
            return f"no report: {metrics} has fewer than {MIN_LOG_LINES} log lines; lower --log-interval"
        page.write_text(report_page([run]), encoding="utf-8")
    except Exception as error:
        # The run is trained and saved by now; a failed report must not change its exit status.
        return f"warning: no report was written to {page}: {error}"
    return f"report: {page}"
