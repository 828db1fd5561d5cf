"""CPU time of the planner's search: `python benchmarks/planner_search.py`.

The goals are 2 seconds for a dense model on 512 GPUs and 10 seconds on 16,384.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.cli import run_command
from megatron.commands.plan_inputs import PlanConfig, make_cluster, make_job
from megatron.planner.search import search

CASES = (
    ("llama3-70b", "h100", 512),
    ("llama3.1-405b", "h100", 16384),
    ("1t", "a100", 3072),
    ("gpt3-175b", "gb200", 1152),
    ("deepseek-v3", "h100", 2048),
    ("qwen3-30b-a3b", "h100", 512),
)


def main() -> None:
    for model, gpu, gpus in CASES:
        config = PlanConfig(model=model, gpu=gpu, gpus=gpus)
        begin = time.process_time()
        result = search(make_job(config, {}), make_cluster(config), num_plans=10, progress=lambda count: None)
        print(
            f"{model} on {gpus:,} {gpu}: {time.process_time() - begin:.2f} s for {result.layouts:,} layouts, of which "
            f"{result.timed} were simulated; the best: {result.plans[0].layout}",
            flush=True,
        )


if __name__ == "__main__":
    run_command(main)
