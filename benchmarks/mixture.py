"""Compare training steps of a mixture of experts with a dense model of the same active FLOPs, and with transformers.

    python benchmarks/mixture.py [--precisions fp32 bf16] [--rounds N] [--output FILE]

8 experts of which each token passes 2, against a dense MLP as wide as these 2, and transformers' Mixtral of the same
shape by the faster of its two implementations; on one process with two threads, and on two processes that share the
experts. All sides train on random tokens with AdamW, and their steps alternate. In bf16 transformers trains fp32
weights under torch.autocast, as its Trainer does. Ratios are medians over the rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from parallel import run_metadata
from parallel_steps import COMMON, NO_DROPOUT, time_steps
from parallel_workers import Workers

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag

LAYERS, HIDDEN, HEADS, GROUPS, FFN, EXPERTS, TOPK = 4, 512, 8, 4, 704, 8, 2
LENGTH, BATCH, VOCAB = 512, 4, 8192
SHAPE = f"""
    {COMMON} {NO_DROPOUT} --device cpu --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS}
    --group-query-attention --num-query-groups {GROUPS} --seq-length {LENGTH} --vocab-size {VOCAB - 1}
    --micro-batch-size {BATCH // 2} --global-batch-size {BATCH} --position-embedding-type rope --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
"""
DENSE = f"{SHAPE} --ffn-hidden-size {FFN * TOPK}"
MIXTURE = f"""
    {SHAPE} --ffn-hidden-size {FFN} --num-experts {EXPERTS} --moe-router-topk {TOPK}
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01
"""
SIDES = {
    "dense": (1, DENSE),
    "mixture": (1, MIXTURE),
    "mixture, grouped products": (1, f"{MIXTURE} --moe-grouped-gemm"),
    "mixture, D2": (2, MIXTURE),
    "mixture, E2": (2, f"{MIXTURE} --expert-model-parallel-size 2"),
}
GOALS = {
    "dense / mixture": 0.75,
    "transformers / best mixture": 1.3,
    "mixture / mixture, E2": 0.85,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    precisions: tuple[str, ...] = flag(
        ("fp32", "bf16"), "precisions to measure", choices=("fp32", "bf16"), nargs="+"
    )
    rounds: int = flag(7, "measured steps of each side", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/mixture.json"), "file to write the results to", metavar="FILE"
    )


def transformers_steps(implementation: str, precision: str) -> Iterator[float]:
    """Yield the seconds of each step of transformers' Mixtral, on two microbatches."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        max_position_embeddings=LENGTH,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        use_cache=False,
        experts_implementation=implementation,
    )
    model = MixtralForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    while True:
        begin = time.perf_counter()
        for part in ids.chunk(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(input_ids=part, labels=part).loss
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results = run_metadata("mixture.py", argv)
    for precision in config.precisions:
        print(precision, flush=True)
        results[precision] = compare(precision, config.rounds)
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def compare(precision: str, count: int) -> dict[str, object]:
    """Tokens per second of all sides, and the ratios of their times over `count` rounds."""
    ours = "--bf16" if precision == "bf16" else ""
    with contextlib.ExitStack() as stack:
        runs = {
            name: stack.enter_context(
                Workers(time_steps, processes, f"{flags} {ours}", threads=2 // processes)
            )
            for name, (processes, flags) in SIDES.items()
        }
        for implementation in ("eager", "grouped_mm"):
            run = Workers(transformers_steps, 1, implementation, precision, threads=2)
            runs[f"transformers, {implementation}"] = stack.enter_context(run)
        for run in runs.values():
            run.next()
        rounds = [{name: run.next()[0] for name, run in runs.items()} for _ in range(count)]
    for times in rounds:
        times["transformers"] = min(times[name] for name in times if name.startswith("transformers"))
        mine = ("mixture", "mixture, grouped products")
        times["best mixture"] = min(times[name] for name in mine)
    medians = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
    rates = {name: round(BATCH * LENGTH / seconds) for name, seconds in medians.items()}
    ratios = {}
    for name, goal in GOALS.items():
        above, below = name.split(" / ")
        ratio = statistics.median(times[above] / times[below] for times in rounds)
        ratios[name] = {"ratio": round(ratio, 3), "goal": goal}
        print(f"time of {above} / time of {below}: {ratio:.3f} (goal {goal})", flush=True)
    for name, rate in rates.items():
        print(f"  {name:28} {rate:,} tokens/s")
    return {"tokens/s": rates, "ratios of times": ratios}


if __name__ == "__main__":
    run_command(main)
