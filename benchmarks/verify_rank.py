"""One rank of a run that `benchmarks/verify.py` verifies, in a checkout that may have a fault.

    torchrun --nproc-per-node 2 verify_rank.py FILE

FILE is JSON: the `flags` of pretrain_gpt.py, the arguments `spread` of `DividedSums` or null, and `lines`, a file to
write the executed lines of megatron/ to, or null.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

# The checkout that torchrun started this in.
ROOT = Path.cwd()
sys.path.insert(0, str(ROOT))

from megatron.commands.verify import train_rank


class Lines:
    """Traces the lines of megatron/ that this process executes."""

    def __init__(self) -> None:
        self.found: set[tuple[str, int]] = set()
        self.prefix = f"{ROOT / 'megatron'}{os.sep}"

    def start(self) -> None:
        threading.settrace(self.call)
        sys.settrace(self.call)

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(self.prefix) else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.found.add((frame.f_code.co_filename, frame.f_lineno))
        return self.line

    def write(self, path: str) -> None:
        rows = sorted((os.path.relpath(file, ROOT), line) for file, line in self.found)
        Path(f"{path}-{os.environ['RANK']}").write_text(json.dumps(rows), encoding="utf-8")


def main(path: str) -> None:
    run = json.loads(Path(path).read_text(encoding="utf-8"))
    spread = run["spread"] and tuple(run["spread"])
    lines = Lines() if run["lines"] else None
    if lines is not None:
        lines.start()
    train_rank("pretrain_gpt", run["flags"], spread)
    if lines is not None:
        sys.settrace(None)
        lines.write(run["lines"])


if __name__ == "__main__":
    main(sys.argv[1])
