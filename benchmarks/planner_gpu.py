"""Compare the planner's and the dry run's predictions with measured steps and memory of real models on one GPU.

    python benchmarks/planner_gpu.py [--runs gpt-355m llama-1b ...]

Each model trains 14 iterations of made-up data with pretrain_gpt.py, one after the other. Time is the median of the
last 9 iterations, each of which ends with a line of the log; memory is the peak that torch's allocator had in use. The
constants of the prediction are those of the GPU's data sheet and generation; nothing is fitted to these runs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import run_metadata

from megatron.arguments import parse_run_config
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.planner.cluster import cluster_from_data_sheet
from megatron.planner.device_specs import of_torch_name
from megatron.planner.given import given_run
from megatron.planner.memory import max_memory
from megatron.planner.profiles import find_constants, with_constants
from megatron.planner.programs import OURS
from megatron.planner.simulate import Simulator
from megatron.pretrain_gpt import DEFAULTS

ITERATIONS, MEASURED = 14, 9
COMMON = f"""
    --mock-data --tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --bf16 --seed 3
    --train-iters {ITERATIONS} --log-interval 1 --eval-iters 0 --num-workers 2 --log-memory-to-tensorboard
"""
GPT = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50303
    --global-batch-size 16
"""
LLAMA = """
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --group-query-attention
"""
LLAMA_1B = f"""
    {LLAMA} --num-layers 16 --hidden-size 2048 --num-attention-heads 32 --num-query-groups 8 --ffn-hidden-size 8192
    --vocab-size 128255
"""
LLAMA_8B = f"""
    {LLAMA} --num-layers 8 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --ffn-hidden-size 14336
    --vocab-size 32000 --seq-length 8192 --micro-batch-size 1
"""
SHORT = "--seq-length 4096 --micro-batch-size 2 --global-batch-size 4"
RUNS = {
    "gpt-355m": f"{GPT} --micro-batch-size 16",
    "gpt-355m, 4 microbatches": f"{GPT} --micro-batch-size 4",
    "gpt-355m, 4 microbatches, CUDA graph": f"{GPT} --micro-batch-size 4 --cuda-graph",
    "llama-1b": f"{LLAMA_1B} {SHORT}",
    "llama-1b, 32k": f"{LLAMA_1B} --seq-length 32768 --micro-batch-size 1 --recompute-granularity full",
    "llama-1b, optimizer on the host": f"{LLAMA_1B} {SHORT} --cpu-offload-optimizer",
    "llama-1b, activations on the host": f"{LLAMA_1B} {SHORT} --cpu-offload-activations",
    "llama-8b, 8 layers": LLAMA_8B,
    "llama-8b, 8 layers, FP8": f"{LLAMA_8B} --fp8-format hybrid",
    "64 experts, 4 layers": f"""
        {LLAMA} --num-query-groups 16 --num-layers 4 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 1024
        --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1024 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2
        --vocab-size 50303 --seq-length 4096 --micro-batch-size 2
    """,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    runs: tuple[str, ...] = flag(
        tuple(RUNS), "models to measure", choices=tuple(RUNS), nargs="+", metavar="NAME"
    )
    output: str = flag(
        str(ROOT / "benchmarks/results/planner_gpu.json"), "file to write the results to", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__)
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    if not torch.cuda.is_available():
        raise InputError("torch finds no GPU, and this benchmark measures one")
    gpu = torch.cuda.get_device_name()
    results = run_metadata("planner_gpu.py", argv) | {"runs": (runs := {})}
    failed = 0
    for name in config.runs:
        flags = f"{COMMON} {RUNS[name]}".split()
        try:
            measured = measure(flags)
        except subprocess.CalledProcessError as error:
            print(
                f"error: {name}: {(error.stderr.strip().splitlines() or ['no message'])[-1]}", file=sys.stderr
            )
            failed += 1
            continue
        runs[name] = row = compare(flags, gpu, *measured)
        print(f"{name}: " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(failed > 0)


def pretrain(flags: Sequence[str], *more: str) -> None:
    command = [sys.executable, "pretrain_gpt.py", *flags, *more]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)


def measure(flags: Sequence[str]) -> tuple[float, float]:
    """Seconds of an iteration and peak bytes of a run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        pretrain(flags, "--device", "cuda", "--metrics-path", str(path))
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records = [record for record in records if "seconds per iteration" in record]
    seconds = statistics.median(record["seconds per iteration"] for record in records[-MEASURED:])
    return seconds, records[-1]["mem-max-allocated-bytes"]


def compare(flags: Sequence[str], gpu: str, seconds: float, memory: float) -> dict[str, float]:
    """Measured seconds and GB of a run, with the errors of the planner and of the dry run.

    Raises:
        InputError: the planner has no data sheet of this GPU.
    """
    sheet = of_torch_name(gpu)
    if sheet is None:
        raise InputError(f"the planner has no data sheet of {gpu} (megatron/planner/device_specs.py)")
    cluster = with_constants(cluster_from_data_sheet(sheet, 1), find_constants(sheet.name))
    job, layout = given_run(parse_run_config(flags, description="", defaults=DEFAULTS), 1)
    predicted = Simulator(job, layout, cluster, OURS).step().seconds
    planned = max_memory(job, layout, cluster, OURS).total
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "count.json"
        pretrain(flags, "--dry-run", "--dry-run-json", str(path))
        counted = json.loads(path.read_text(encoding="utf-8"))["ranks"][0]["memory"]["peak"]
    return {
        "seconds": round(seconds, 4),
        "predicted": round(predicted, 4),
        "error": round(predicted / seconds - 1, 3),
        "peak GB": round(memory / 1e9, 2),
        "planner's GB": round(planned / 1e9, 2),
        "error of the planner's": round(planned / memory - 1, 3),
        "dry run's GB": round(counted / 1e9, 2),
        "error of the dry run's": round(counted / memory - 1, 3),
    }


if __name__ == "__main__":
    run_command(main)
