"""Compare what a mixture of experts and a dense model with the same active parameters learn from the same tokens.

    python benchmarks/mixture_quality.py [--train-iters N] [--seeds N] [--output FILE]

Both train on the quick start's corpus with a vocabulary of 1,024: two layers with a dense MLP of 176 features, or with
16 experts of 88, of which each token passes 2. The weights of a token's experts sum to 2, so that the output of the
experts is as large as that of the dense MLP. Prints the validation losses over each run.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import run_metadata

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag

SHAPE = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 16
    --global-batch-size 16 --lr 4e-3 --min-lr 4e-4 --attention-dropout 0 --hidden-dropout 0 --swiglu
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --lr-decay-style cosine
    --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --split 90,5,5 --device cpu
    --log-interval 100 --eval-interval 250 --eval-iters 40 --tokenizer-type GPT2BPETokenizer
"""
SIDES = {
    "dense": "--ffn-hidden-size 176",
    "mixture": "--moe-ffn-hidden-size 88 --num-experts 16 --moe-router-topk 2 --moe-router-topk-scaling-factor 2 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    train_iters: int = flag(1000, "iterations of each run", low=1)
    seeds: int = flag(
        3, "runs of each model, with other initial weights and another order of the data", low=1
    )
    workers: int = flag(2, "runs at the same time", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/mixture_quality.json"), "file to write the results to", metavar="FILE"
    )


def run(script: str, *words: object) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, words)],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )


def prepare(folder: Path) -> list[object]:
    """Build the corpus and its tokenizer in a folder. Returns the flags of the data."""
    text, tokenizer, prefix = folder / "corpus.jsonl", folder / "tokenizer", folder / "corpus"
    run("tools/make_corpus.py", "--output", text)
    run(
        "tools/train_tokenizer.py",
        *("--input", text, "--type", "bpe", "--vocab-size", 1024, "--output", tokenizer),
    )
    files = ("--vocab-file", tokenizer / "vocab.json", "--merge-file", tokenizer / "merges.txt")
    run(
        "tools/preprocess_data.py",
        *("--input", text, "--output-prefix", prefix, "--append-eod"),
        *("--tokenizer-type", "GPT2BPETokenizer", *files),
    )
    return ["--data-path", f"{prefix}_text_document", *files]


def losses(case: tuple[str, int], iterations: int, data: list[object], folder: Path) -> dict[str, Any]:
    """Seed of a run of (side, seed), and its validation losses by iteration."""
    side, seed = case
    metrics = folder / f"{side}-{seed}.jsonl"
    length = ("--train-iters", iterations, "--seed", seed, "--metrics-path", metrics)
    run("pretrain_gpt.py", *SHAPE.split(), *SIDES[side].split(), *data, *length)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    name = "lm loss validation"
    found = {str(row["iteration"]): round(row[name], 4) for row in rows if name in row}
    print(f"{side}, seed {seed}: {found}", flush=True)
    return {"seed": seed, "validation loss": found}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results: dict[str, Any] = run_metadata("mixture_quality.py", argv)
    results["flags"] = {"both": " ".join(SHAPE.split()), **SIDES}
    results["tokens"] = config.train_iters * 16 * 128
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(config.workers) as pool:
        folder = Path(name)
        data = prepare(folder)
        cases = [(side, seed) for seed in range(1, config.seeds + 1) for side in SIDES]
        runs = list(pool.map(lambda case: losses(case, config.train_iters, data, folder), cases))
    last: dict[str, list[float]] = {side: [] for side in SIDES}
    for (side, _), found in zip(cases, runs, strict=True):
        results.setdefault(side, []).append(found)
        last[side].append(list(found["validation loss"].values())[-1])
    for side, values in last.items():
        results[f"{side}, mean of the last"] = round(statistics.mean(values), 4)
        print(f"{side}: validation loss {statistics.mean(values):.4f} ({min(values)} to {max(values)})")
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
