"""Compare training steps with nanoGPT and transformers, for the same model sizes and tokens.

    python benchmarks/train.py --nanogpt DIR [--sizes small ...] [--precisions bf16 fp32] [--rounds N] [--device cuda]

DIR is a checkout of nanoGPT; without it, nanoGPT is skipped. transformers' Trainer, which is compared on a CPU, needs
accelerate (pip install accelerate); --no-trainer skips it. Each implementation runs in its own process with the same
number of threads, and trains on the same random tokens with AdamW and gradient clipping, without dropout. On a CPU
their steps alternate, so all run under the same load of the machine; on a GPU they run one after the other, since its
memory holds one, and one that fails is reported and left out. Ratios are medians over the rounds. The peak rate of
large matmuls is measured in the same way.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from parallel import run_metadata
from parallel_workers import Workers
from train_sides import DTYPES, SIZES, THREADS, Size, baseline, flops, hf_trainer, matmul_rate, ours

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.performance.cuda_graph import WARM_UP
from megatron.performance.fp8 import MIN_CAPABILITY
from megatron.planner.device_specs import peak_flops

# Rounds that compile, allocate memory and capture a CUDA graph; not measured.
WARM_UP_ROUNDS = WARM_UP + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    nanogpt: str | None = flag(None, "checkout of nanoGPT to compare with", metavar="DIR")
    device: str = flag("cpu", "device to measure", choices=("cpu", "cuda"))
    sizes: tuple[str, ...] = flag(("small",), "models to measure", choices=tuple(SIZES), nargs="+")
    precisions: tuple[str, ...] = flag(
        ("bf16", "fp32"), "precisions to measure", choices=tuple(DTYPES), nargs="+"
    )
    trainer: bool = flag(True, "on a CPU, compare with transformers' Trainer")
    sides: tuple[str, ...] = flag(
        (), "implementations to measure, by their names in the results (default: all)", nargs="+"
    )
    rounds: int = flag(7, "measured steps per implementation", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/train.json"), "file to write the results to", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    if config.nanogpt is not None and not (Path(config.nanogpt) / "model.py").is_file():
        raise InputError(f"--nanogpt: {config.nanogpt} has no model.py; give a checkout of nanoGPT")
    if config.device == "cpu" and config.trainer and importlib.util.find_spec("accelerate") is None:
        raise InputError(
            "accelerate is not installed, but transformers' Trainer needs it: pip install accelerate, or use "
            "--no-trainer"
        )
    results = run_metadata("train.py", argv)
    failed: list[str] = []
    for name in config.sizes:
        for precision in config.precisions:
            results[f"{name}, {precision}, {config.device}"] = results_by_side = compare(
                config, SIZES[name], precision, failed
            )
            print(f"{name}, {precision}, {config.device}:")
            for side, values in results_by_side.items():
                print(
                    f"  {side:24} " + "  ".join(f"{key} {value:,}" for key, value in values.items()),
                    flush=True,
                )
            Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(bool(failed))


def compare(
    config: BenchmarkConfig, size: Size, precision: str, failed: list[str]
) -> dict[str, dict[str, float]]:
    """Return time and memory per step of each implementation, and our speedup over it.

    On a GPU implementations that fail are left out, and added to `failed`.
    """
    sides: dict[str, tuple[Callable, tuple]] = {
        "ours": (ours, ()),
        "ours, plain": (ours, ("--ops-backend", "plain")),
    }
    if config.device == "cuda" and size is SIZES["small"]:
        sides["ours, CUDA graph"] = (ours, ("--cuda-graph",))
    has_fp8 = config.device == "cuda" and torch.cuda.get_device_capability() >= MIN_CAPABILITY
    if has_fp8 and precision == "bf16" and importlib.util.find_spec("torchao") is not None:
        sides["ours, FP8"] = (ours, ("--fp8-format", "hybrid"))
    if config.nanogpt is not None:
        sides["nanoGPT, compiled"] = (baseline, ("nanogpt", config.nanogpt, True))
    if config.device == "cpu":
        sides["transformers"] = (baseline, ("transformers", None, False))
    if config.device == "cpu" and config.trainer:
        sides["transformers' Trainer"] = (hf_trainer, ())
    sides["transformers, compiled"] = (baseline, ("transformers", None, True))
    sides["largest products"] = (matmul_rate, ())
    if unknown := set(config.sides) - set(sides):
        raise InputError(f"--sides: {min(unknown)!r} is not one of {', '.join(map(repr, sides))}")
    sides = {side: sides[side] for side in config.sides or sides}
    rounds: list[dict[str, Any]] = [{} for _ in range(config.rounds + WARM_UP_ROUNDS)]
    for group in [[side] for side in sides] if config.device == "cuda" else [list(sides)]:
        workers = {
            side: Workers(measure, 1, config.device, size, precision, *arguments, threads=THREADS)
            for side, (measure, arguments) in sides.items()
            if side in group
        }
        try:
            for results in rounds:
                results |= {side: run.next()[0] for side, run in workers.items()}
        except RuntimeError as error:
            if config.device == "cpu":
                raise
            print(f"error: {group[0]}: {error}", file=sys.stderr, flush=True)
            failed += group
        finally:
            for run in workers.values():
                run.__exit__()
    rounds = rounds[WARM_UP_ROUNDS:]
    name = torch.cuda.get_device_name() if config.device == "cuda" else ""
    sheet = peak_flops(name, DTYPES[precision])
    peak = max((r["largest products"][0] for r in rounds if "largest products" in r), default=None)
    work = flops(config.device, size, precision)
    # The last round has the sides that did not fail.
    summaries = {
        side: summarize(rounds, side, size, work, peak, sheet)
        for side in rounds[-1]
        if side != "largest products"
    }
    return summaries | ({} if peak is None else {"largest products": {"TFLOP/s": round(peak / 1e12, 3)}})


def summarize(
    rounds: list[dict], side: str, size: Size, work: float, peak: float | None, sheet: float | None
) -> dict[str, float]:
    """Results of a side. `peak` is the measured FLOP/s of products and `sheet` that of the GPU's data sheet; None if
    unknown."""
    seconds = statistics.median(r[side][0] for r in rounds)
    found = {} if sheet is None else {"MFU": round(work / seconds / sheet, 3)}
    found |= {"seconds": round(seconds, 4), "tokens/s": round(size.batch * size.length / seconds)}
    if "ours" in rounds[-1]:
        found["ours over it"] = round(statistics.median(r[side][0] / r["ours"][0] for r in rounds), 3)
    if peak is not None:
        found["of the largest products"] = round(work / seconds / peak, 3)
    return found | {"peak MB": round(rounds[-1][side][1]), "loss": round(rounds[-1][side][2], 3)}


if __name__ == "__main__":
    run_command(main)
