"""A copy of the launch scripts with a stub for Python that answers their queries."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Stub for Python: answers the queries of the scripts; every other command succeeds at once.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *"import torch") exit "${NO_TORCH:-0}" ;;
  *cuda.is_available*) exit "${NO_GPU:-1}" ;;
  "- "*) printf '%s' "${MISSING:-}" ;;
  "-c import sys; print"*) echo /elsewhere/site-packages ;;
  *purelib*) mkdir -p "$VENV_PACKAGES"; echo "$VENV_PACKAGES" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *pretrain_gpt.py* | *pretrain_bert.py*)
    trap 'kill $! 2>/dev/null; echo "passed on"; exit "${STATUS:-143}"' TERM
    [[ -z ${SIGNAL:-} ]] || kill -s "$SIGNAL" "$PPID"
    [[ -z ${LONG:-} ]] || { sleep 30 >&- 2>&- & wait; }
    [[ -z ${SIGNAL:-} ]] || sleep 0.5 # bash may lose the status of a command that ends with the signal
    exit "${STATUS:-0}" ;;
esac
"""

SCRIPT_VARIABLES = {
    "CHECKPOINT_PATH",
    "DATA_PATH",
    "GPUS_PER_NODE",
    "LAUNCHER",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MERGE_FILE",
    "NNODES",
    "NODE_RANK",
    "PYTHON",
    "QUICKSTART_DIR",
    "VOCAB_FILE",
}
TOKENIZER = {"VOCAB_FILE": "v.json", "MERGE_FILE": "m.txt"}
RUN = TOKENIZER | {"DATA_PATH": "a", "CHECKPOINT_PATH": "run"}


class Checkout:
    """Copy of the scripts in a folder whose name contains a space."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "my clone"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        self.python = folder / "bin" / "python3"
        self.python.parent.mkdir()
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def run(
        self, script: str, *flags: str, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess:
        kept = {k: v for k, v in os.environ.items() if k not in SCRIPT_VARIABLES}
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        packages = str(self.root / ".venv" / "packages")
        return subprocess.run(
            ["bash", str(self.root / "scripts" / script), *flags],
            cwd=cwd or self.root,
            env=kept | {"PATH": path, "VENV_PACKAGES": packages} | env,
            capture_output=True,
            text=True,
        )


def commands(done: subprocess.CompletedProcess) -> list[list[str]]:
    """Return the commands that a script printed before it ran them."""
    assert done.stderr == ""
    return [shlex.split(line[2:]) for line in done.stdout.splitlines() if line.startswith("+ ")]


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]
