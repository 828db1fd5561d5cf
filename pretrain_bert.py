"""`megatron pretrain-bert` from a checkout."""

from __future__ import annotations

from megatron.cli import run_command

if __name__ == "__main__":
    run_command("megatron.pretrain_bert")
