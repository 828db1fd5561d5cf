"""Draw one run or several as one HTML page: losses, gradient norm, speed, samples, evaluations, flags.

megatron report my/checkpoints                          one run: its --save folder or its --metrics-path
megatron report my/run-1 my/run-2 --output both.html    two runs, overlaid
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.cli import Parser, run_command
from megatron.reports.page import report_page
from megatron.reports.record import read_record
from megatron.tool import check_output_file, write_output_file


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="a run's --save folder, or its file of --metrics-path",
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("report.html"), help="the page to write"
    )
    args = parser.parse_args(argv)
    check_output_file("--output", args.output)
    write_output_file("--output", args.output, report_page([read_record(run) for run in args.runs]))
    print(f"wrote {args.output}")


if __name__ == "__main__":
    run_command(main)
