"""Errors that end a command with one line, and the report of a fatal one."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


class InputError(ValueError):
    """Raised for wrong input: a flag, a file or a checkpoint.

    The message names the flag or file (and line), the value, and what would be right. Entry points print it as one
    line and exit with status 2. Any exception other than this and `TrainingFault` is a bug and keeps its traceback.
    """

    exit_status = 2


class TrainingFault(RuntimeError):
    """Raised when training cannot continue and restarting it unchanged would not help."""

    exit_status = 1


class TransientFault(TrainingFault):
    """Raised when training cannot continue but a restart may help: a process died, or a machine computes wrongly."""

    # Above 127, like death by a signal: restart policies that retry on such statuses (Kubeflow's ExitCode) retry this.
    exit_status = 200


class LostRank(TransientFault):
    """Raised when a communication failed because another process died or hangs."""


def report_fatal(message: str) -> None:
    """Report a fatal error to stderr and to torchrun, whose summary shows it for each process.

    Wrong flags are wrong on every rank, so only rank 0 prints to stderr under torchrun. Without torchrun every process
    does.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # torchrun kills every rank once one has exited; give rank 0 time to print
    if path is not None:
        # The format of torch.distributed.elastic's error files, without the traceback.
        report = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(path).write_text(json.dumps(report), encoding="utf-8")
