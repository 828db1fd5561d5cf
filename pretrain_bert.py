"""`megatron pretrain-bert` from a checkout."""

from __future__ import annotations

from megatron.cli import run_command
from megatron.pretrain_bert import main

if __name__ == "__main__":
    run_command(main)
