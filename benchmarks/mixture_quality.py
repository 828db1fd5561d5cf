"""Compare what a mixture of experts and a dense model with the same active parameters learn from the same tokens.

    python benchmarks/mixture_quality.py [--train-iters N] [--output FILE]

Both train on the quick start's corpus in its shape, but with RMSNorm, RoPE and SwiGLU: a dense MLP of 704 features, or
8 experts of 352, of which each token passes 2. Prints the validation losses over the run.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import run_metadata

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag

SHAPE = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --micro-batch-size 8
    --global-batch-size 16 --lr 1e-3 --min-lr 1e-4 --attention-dropout 0 --hidden-dropout 0 --swiglu
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --lr-decay-style cosine
    --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --split 90,5,5 --device cpu
    --log-interval 10 --eval-interval 50 --eval-iters 20 --tokenizer-type GPT2BPETokenizer
"""
SIDES = {
    "dense": "--ffn-hidden-size 704",
    "mixture": "--ffn-hidden-size 352 --num-experts 8 --moe-router-topk 2 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    train_iters: int = flag(300, "iterations of both runs", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/mixture_quality.json"), "file to write the results to", metavar="FILE"
    )


def run(script: str, *words: object) -> None:
    subprocess.run([sys.executable, str(ROOT / script), *map(str, words)], check=True, cwd=ROOT)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results = run_metadata("mixture_quality.py", argv)
    losses: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, tokenizer, prefix = folder / "corpus.jsonl", folder / "tokenizer", folder / "corpus"
        run("tools/make_corpus.py", "--output", text)
        run(
            "tools/train_tokenizer.py",
            *("--input", text, "--type", "bpe", "--vocab-size", 8192, "--output", tokenizer),
        )
        files = ("--vocab-file", tokenizer / "vocab.json", "--merge-file", tokenizer / "merges.txt")
        run(
            "tools/preprocess_data.py",
            *("--input", text, "--output-prefix", prefix, "--append-eod"),
            *("--tokenizer-type", "GPT2BPETokenizer", *files),
        )
        for side, flags in SIDES.items():
            metrics = folder / f"{side}.jsonl"
            data = ("--data-path", f"{prefix}_text_document", *files)
            length = ("--train-iters", config.train_iters, "--metrics-path", metrics)
            run("pretrain_gpt.py", *SHAPE.split(), *flags.split(), *data, *length)
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            losses[side] = {
                row["iteration"]: round(row["lm loss validation"], 4)
                for row in rows
                if "lm loss validation" in row
            }
    for iteration in losses["dense"]:
        values = "  ".join(f"{side} {losses[side][iteration]:.4f}" for side in SIDES)
        print(f"validation loss at iteration {iteration}: {values}", flush=True)
    results["validation loss"] = losses
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
