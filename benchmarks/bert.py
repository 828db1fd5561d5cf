"""Pretraining steps of BERT against transformers' MegatronBert in a plain PyTorch loop: time and memory.

    python benchmarks/bert.py [--rounds N]

Both train a model of the same sizes in fp32 with fused AdamW, dropout and clipping, on the same batches of
--mock-data, padded alike to a multiple of 8. Each has a process of its own with two threads; steps are interleaved.
transformers' model projects every position to the vocabulary, and ours those of the masked words. Ours is measured
a second time with full recomputation, the setting for large models.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from parallel import about
from parallel_workers import Workers
from torch import Tensor

from megatron.arguments import parse_run_config
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.data.bert_dataset import BertBatch
from megatron.data.loader import train_batches
from megatron.flags import Config, flag
from megatron.parallel.mesh import choose_device, init_mesh
from megatron.tokenizer import build_tokenizer
from megatron.training.config import RunConfig
from megatron.training.engine import Engine
from pretrain_bert import DEFAULTS, bert, build_datasets

COMMON = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 30591 --train-iters 100 --num-workers 0 --lr 1e-4
    --device cpu
"""
SIZES = {
    "4 layers, hidden 256, sequence 128, batch 32": """
        --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 32
    """,
    "12 layers, hidden 768, sequence 128, batch 8 (BERT-base)": """
        --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 128 --micro-batch-size 8
    """,
}
THREADS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """How often to measure."""

    rounds: int = flag(5, "steps of each side, one after the other", low=1)
    output: str = flag(str(ROOT / "benchmarks/results/bert.json"), "where results go", metavar="FILE")


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results = about("bert.py", argv)
    for name, sizes in SIZES.items():
        flags = f"{COMMON} {sizes}"
        sides = {
            "ours": Workers(ours, 1, flags, threads=THREADS),
            "ours, recomputing": Workers(ours, 1, f"{flags} --recompute-granularity full", threads=THREADS),
            "transformers": Workers(theirs, 1, flags, threads=THREADS),
        }
        try:
            rounds = [{side: run.next()[0] for side, run in sides.items()} for _ in range(config.rounds + 1)]
        finally:
            for run in sides.values():
                run.__exit__()
        results[name] = summary(rounds[1:])  # the first step takes memory
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def summary(rounds: list[dict[str, tuple[float, float, float]]]) -> dict[str, dict[str, float]]:
    """Median seconds of a step, peak memory, last loss; and the ratios to transformers."""
    found = {}
    for side in rounds[0]:
        seconds = statistics.median(r[side][0] for r in rounds)
        memory, loss = rounds[-1][side][1:]
        times = statistics.median(r["transformers"][0] / r[side][0] for r in rounds)
        found[side] = {
            "seconds": round(seconds, 3),
            "speed over transformers": round(times, 3),
            "peak MB": round(memory),
            "memory over transformers": round(memory / rounds[-1]["transformers"][1], 3),
            "loss": round(loss, 4),
        }
    return found


def batches_of(config: RunConfig) -> tuple[Iterator[BertBatch], int]:
    """Endless training batches, and how many ids there are."""
    tokenizer = build_tokenizer(config.tokenizer)
    train = build_datasets(config, tokenizer, (100 * config.training.micro_batch_size, 0, 0))["train"]
    batches = train_batches(
        train,
        config.data,
        micro_batch_size=config.training.micro_batch_size,
        dp_rank=0,
        dp_size=1,
        consumed_samples=0,
        pin_memory=False,
    )
    return batches, tokenizer.vocab_size


def peak_since(before: float) -> float:
    """Megabytes that this process has come to hold beyond `before`, its packages' own."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before


def ours(flags: str) -> Iterator[tuple[float, float, float]]:
    """Seconds of each step, megabytes at most, loss."""
    config = parse_run_config(flags.split(), description="", defaults=DEFAULTS)
    batches, vocab_size = batches_of(config)
    with init_mesh(config.parallel, choose_device("cpu")) as mesh:
        before = peak_since(0)
        padded = -(-vocab_size // 128) * 128
        task = bert(binary_head=True)
        engine = Engine(config, task, mesh, vocab_size=vocab_size, padded_vocab_size=padded)
        engine.buffer.initialize(1)
        step = 0
        while True:
            begin = time.perf_counter()
            losses, _ = engine.train_step(
                batches, num_microbatches=1, consumed_samples=step, lr=1e-4, weight_decay=0.01
            )
            loss = losses.sum().item()
            yield time.perf_counter() - begin, peak_since(before), loss
            step += config.training.micro_batch_size


def theirs(flags: str) -> Iterator[tuple[float, float, float]]:
    """The same of transformers' model."""
    import transformers

    config = parse_run_config(flags.split(), description="", defaults=DEFAULTS)
    batches, vocab_size = batches_of(config)
    before = peak_since(0)
    sizes = config.model
    model = transformers.MegatronBertForPreTraining(
        transformers.MegatronBertConfig(
            vocab_size=vocab_size,
            num_hidden_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_attention_heads,
            intermediate_size=sizes.ffn_hidden_size,
            max_position_embeddings=sizes.max_position_embeddings,
            hidden_act="gelu_new",
            layer_norm_eps=sizes.norm_epsilon,
        )
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    for batch in batches:
        begin = time.perf_counter()
        loss = model(
            batch.tokens,
            attention_mask=batch.padding_mask,
            token_type_ids=batch.tokentype_ids,
            labels=everywhere(batch),
            next_sentence_label=batch.is_random,
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        yield time.perf_counter() - begin, peak_since(before), value


def everywhere(batch: BertBatch) -> Tensor:
    """Labels of all positions, -100 where nothing is to be guessed, which is how transformers takes them."""
    labels = torch.full_like(batch.tokens, -100)
    rows, columns = batch.loss_mask.nonzero(as_tuple=True)
    labels[rows, batch.positions[rows, columns]] = batch.labels[rows, columns]
    return labels


if __name__ == "__main__":
    run_command(main)
