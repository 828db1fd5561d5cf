"""Compare time and memory of BERT pretraining steps with transformers' MegatronBert in a plain PyTorch loop.

    python benchmarks/bert.py [--rounds N]

Both train a model of the same shape in fp32 with fused AdamW, dropout and gradient clipping, on the same batches of
--mock-data, padded to a multiple of 8. Each runs in its own process with two threads, and their steps alternate. The
transformers model computes logits for every position, ours only for masked positions. Ours is measured a second time
with full recomputation, as large models use it, and a third time with --padding-free on the same samples. Those of
--mock-data have random lengths from a half of the sequence on, so that padding is more than in most corpora; "useful
tokens" is the share of the computed tokens that is not padding.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from parallel import run_metadata
from parallel_workers import Workers
from torch import Tensor

import megatron.plugins  # noqa: F401 (registers --mock-data)
from megatron.arguments import parse_run_config
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.data.bert_dataset import BertBatch
from megatron.data.loader import train_batches
from megatron.flags import Config, flag
from megatron.parallel.mesh import choose_device, init_mesh
from megatron.pretrain_bert import DEFAULTS, bert, build_datasets
from megatron.tokenizer import build_tokenizer
from megatron.training.build import build_engine
from megatron.training.config import RunConfig

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
    """Options of the benchmark."""

    rounds: int = flag(5, "measured steps per implementation", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/bert.json"), "file to write the results to", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results = run_metadata("bert.py", argv)
    for name, sizes in SIZES.items():
        flags = f"{COMMON} {sizes}"
        sides = {
            "ours": Workers(ours, 1, flags, threads=THREADS),
            "ours, recomputing": Workers(ours, 1, f"{flags} --recompute-granularity full", threads=THREADS),
            "ours, padding-free": Workers(ours, 1, f"{flags} --padding-free", threads=THREADS),
            "transformers": Workers(baseline, 1, flags, threads=THREADS),
        }
        try:
            rounds = [{side: run.next()[0] for side, run in sides.items()} for _ in range(config.rounds + 1)]
        finally:
            for run in sides.values():
                run.__exit__()
        results[name] = summarize(rounds[1:])  # the first step allocates memory
        results[name]["useful tokens"] = {
            form: round(useful_tokens(f"{flags} {more}", config.rounds + 1), 4)
            for form, more in (("padded", ""), ("padding-free", "--padding-free"))
        }
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def summarize(rounds: list[dict[str, tuple[float, float, float]]]) -> dict[str, dict[str, float]]:
    """Return median seconds per step, peak memory, the last loss, and the ratios to transformers."""
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


def build_batches(config: RunConfig) -> tuple[Iterator[BertBatch], int]:
    """Return an endless iterator of training batches, and the vocabulary size."""
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


def useful_tokens(flags: str, rounds: int) -> float:
    """Return the share of the tokens of `rounds` batches that are not padding."""
    batches, _ = build_batches(parse_run_config(flags.split(), description="", defaults=DEFAULTS))
    useful = computed = 0
    for batch in itertools.islice(batches, rounds):
        computed += batch.tokens.numel()
        if batch.document_ids is not None:  # padding is a document after those of the samples
            useful += int((batch.document_ids < len(batch.is_random)).sum())
        else:
            useful += batch.tokens.numel() if batch.padding_mask is None else int(batch.padding_mask.sum())
    return useful / computed


def peak_rss(before: float) -> float:
    """Return the peak resident memory in MB beyond `before`, the peak after importing the packages."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before


def ours(flags: str) -> Iterator[tuple[float, float, float]]:
    """Train our model. Yields seconds, peak MB and loss of each step."""
    config = parse_run_config(flags.split(), description="", defaults=DEFAULTS)
    batches, vocab_size = build_batches(config)
    with init_mesh(config.parallel, choose_device("cpu")) as mesh:
        before = peak_rss(0)
        padded = -(-vocab_size // 128) * 128
        task = bert(binary_head=True)
        engine = build_engine(config, task, mesh, vocab_size=vocab_size, padded_vocab_size=padded)
        engine.buffer.initialize(1)
        step = 0
        while True:
            begin = time.perf_counter()
            losses, _ = engine.train_step(
                batches, num_microbatches=1, consumed_samples=step, lr=1e-4, weight_decay=0.01
            )
            loss = losses.sum().item()
            yield time.perf_counter() - begin, peak_rss(before), loss
            step += config.training.micro_batch_size


def baseline(flags: str) -> Iterator[tuple[float, float, float]]:
    """Train the transformers model. Yields seconds, peak MB and loss of each step."""
    import transformers

    config = parse_run_config(flags.split(), description="", defaults=DEFAULTS)
    batches, vocab_size = build_batches(config)
    before = peak_rss(0)
    shape = config.model
    model = transformers.MegatronBertForPreTraining(
        transformers.MegatronBertConfig(
            vocab_size=vocab_size,
            num_hidden_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            intermediate_size=shape.ffn_hidden_size,
            max_position_embeddings=shape.max_position_embeddings,
            hidden_act="gelu_new",
            layer_norm_eps=shape.norm_epsilon,
        )
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    for batch in batches:
        begin = time.perf_counter()
        loss = model(
            batch.tokens,
            attention_mask=batch.padding_mask,
            token_type_ids=batch.tokentype_ids,
            labels=dense_labels(batch),
            next_sentence_label=batch.is_random,
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        yield time.perf_counter() - begin, peak_rss(before), value


def dense_labels(batch: BertBatch) -> Tensor:
    """Labels of all positions as transformers expects them: -100 where the token is not masked."""
    labels = torch.full_like(batch.tokens, -100)
    rows, columns = batch.loss_mask.nonzero(as_tuple=True)
    labels[rows, batch.positions[rows, columns]] = batch.labels[rows, columns]
    return labels


if __name__ == "__main__":
    run_command(main)
