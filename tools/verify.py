"""`megatron verify` from a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.cli import run_command

if __name__ == "__main__":
    run_command("megatron.commands.verify")
