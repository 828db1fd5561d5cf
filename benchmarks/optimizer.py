"""Compare the time of an optimizer step with the time to stream its bytes once.

    python benchmarks/optimizer.py [--millions N] [--rounds N]

Per element, a step reads the gradient, the master weight and two moments, writes the last three and the bf16 weight,
and clears the gradient. The streaming bandwidth is that of a copy of the same size, measured in the same rounds.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from parallel import run_metadata

from megatron.arguments import parse_run_config
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag
from megatron.ops.cpu.malloc import keep_freed_memory
from megatron.parallel.mesh import choose_device, init_mesh
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training.build import build_engine

BYTES = {"bf16": 4 * 4 + 3 * 4 + 2 + 4, "fp32": 4 * 4 + 3 * 4 + 4}
FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --train-iters 1 --hidden-size 512 --lr 1e-4
    --num-attention-heads 8 --seq-length 512 --micro-batch-size 1 --device cpu
"""
LAYER = 12 * 512**2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    millions: int = flag(25, "parameters of the model, in millions", low=1)
    rounds: int = flag(15, "measured steps per precision", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/optimizer.json"), "file to write the results to", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    keep_freed_memory()
    results = run_metadata("optimizer.py", argv) | {"threads": torch.get_num_threads()}
    for precision in BYTES:
        results[precision] = measure(config, precision)
        print(f"{precision}: {json.dumps(results[precision])}", flush=True)
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def measure(config: BenchmarkConfig, precision: str) -> dict[str, float]:
    flags = f"{FLAGS} --num-layers {max(config.millions * 10**6 // LAYER, 1)}"
    run = parse_run_config(
        [*flags.split(), *(["--bf16"] if precision == "bf16" else [])], description="", defaults=DEFAULTS
    )
    with init_mesh(run.parallel, choose_device("cpu")) as mesh:
        engine = build_engine(run, GPT, mesh, vocab_size=128, padded_vocab_size=128)
        engine.buffer.initialize(1)
        source, target = torch.ones(2, config.millions * 4 * 10**6 // 4)

        def step() -> None:
            engine.buffer.grads.fill_(1e-3)
            begin = time.perf_counter()
            engine.optimizer.step(lr=1e-4, weight_decay=0.1)
            step_seconds.append(time.perf_counter() - begin)

        step_seconds: list[float] = []
        copy_seconds: list[float] = []
        for _ in range(config.rounds + 2):
            step()
            copy_seconds.append(seconds(lambda: target.copy_(source)))
    bandwidth = statistics.median(source.nbytes * 2 / t for t in copy_seconds[2:])
    bytes_once = engine.buffer.local_elements * BYTES[precision]
    median = statistics.median(step_seconds[2:])
    return {
        "parameters": engine.buffer.local_elements,
        "seconds": round(median, 4),
        "GB/s of a copy": round(bandwidth / 1e9, 2),
        "over streaming its bytes once": round(median / (bytes_once / bandwidth), 3),
    }


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    run_command(main)
