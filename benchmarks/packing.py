"""Compare training on packed documents by attention within each document with attention by a dense mask.

    python benchmarks/packing.py [--rounds N] [--output FILE]

A Llama of 17 million parameters in fp32 on two threads, on sequences of 4,096 tokens that hold documents of random
lengths, 256 on average (exponential, concatenated, and cut where a sequence ends). The sides are one engine each, whose
steps on the same batches alternate: one document at a time, a dense mask, and as a bound sequences of 256 tokens that
are not packed. Ratios are medians over the rounds. FLOPs are counted: those of causal attention within documents, and
those of the blocks that torch's kernel computes.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from parallel import run_metadata

import megatron.plugins  # noqa: F401 (registers compiled layers)
from megatron.arguments import parse_run_config
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.data.gpt_dataset import GPTBatch, ltor_batch
from megatron.flags import Config, flag
from megatron.model.flops import attention_flops, flops_per_sample
from megatron.ops.attention import MaskSpec, make_mask
from megatron.ops.cpu.document_attention import DocumentMask, make_document_mask
from megatron.ops.cpu.malloc import keep_freed_memory
from megatron.parallel.mesh import choose_device, init_mesh
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training.build import build_engine
from megatron.training.config import RunConfig

LENGTH, MEAN, VOCAB, THREADS = 4096, 256, 8192, 2
EOD = VOCAB - 1
FLAGS = f"""
    --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --train-iters 100 --num-workers 0 --device cpu
    --num-layers 4 --hidden-size 512 --num-attention-heads 8 --position-embedding-type rope --swiglu --lr 1e-4
    --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 --attention-dropout 0
    --reset-attention-mask --reset-position-ids
"""
PACKED = f"{FLAGS} --seq-length {LENGTH} --micro-batch-size 1"
APART = f"{FLAGS} --seq-length {MEAN} --micro-batch-size {LENGTH // MEAN}"
# Time of the dense mask over that of documents, and FLOPs that are computed over those that are useful.
SPEED_GOAL, FLOPS_GOAL = 1.5, 1.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    rounds: int = flag(7, "measured steps of each side, on as many batches", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/packing.json"), "file to write the results to", metavar="FILE"
    )


def config_of(flags: str) -> RunConfig:
    return parse_run_config(flags.split(), description="", defaults=DEFAULTS)


def packed_batches(number: int, config: RunConfig) -> list[GPTBatch]:
    """Random tokens in documents of random lengths, each of which ends in `EOD`."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(number):
        text = torch.randint(EOD, (1, LENGTH + 1), generator=generator)
        lengths = torch.empty(LENGTH).exponential_(1 / MEAN, generator=generator).ceil().long()
        ends = lengths.cumsum(0) - 1
        text[0, ends[ends <= LENGTH]] = EOD
        batches.append(ltor_batch(text.numpy(), EOD, config.data))
    return batches


def batches_apart(number: int, config: RunConfig) -> list[GPTBatch]:
    """Sequences of `MEAN` random tokens, each a document."""
    generator = torch.Generator().manual_seed(1)
    shape = LENGTH // MEAN, MEAN + 1
    return [
        ltor_batch(torch.randint(EOD, shape, generator=generator).numpy(), EOD, config.data)
        for _ in range(number)
    ]


@contextmanager
def training(
    config: RunConfig, batches: Sequence[GPTBatch], mask: Callable[[MaskSpec], object] | None
) -> Iterator[Callable[[int], float]]:
    """Context with a function that trains on a batch, by number, and returns the seconds.

    `mask` replaces the function that makes masks.
    """
    with init_mesh(config.parallel, choose_device("cpu")) as mesh:
        engine = build_engine(config, GPT, mesh, vocab_size=VOCAB, padded_vocab_size=VOCAB)
        if mask is not None:
            engine.modules[0].context = dataclasses.replace(
                engine.model.context, ops=dataclasses.replace(engine.ops, make_mask=mask)
            )
        engine.buffer.initialize(1)

        def step(i: int) -> float:
            begin = time.perf_counter()
            batch = iter([batches[i % len(batches)]])
            engine.train_step(batch, num_microbatches=1, consumed_samples=i, lr=1e-4, weight_decay=0.1)
            return time.perf_counter() - begin

        yield step


def computed_pairs(length: int) -> int:
    """Pairs that torch's causal kernel for CPUs computes: blocks of queries, each with the blocks of 512 keys up to its
    last query."""
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    ends = [min(begin + rows, length) for begin in range(0, length, rows)]
    starts = [0, *ends[:-1]]
    return sum((e - b) * min(-(-e // 512) * 512, length) for b, e in zip(starts, ends, strict=True))


def count_flops(config: RunConfig, batches: Sequence[GPTBatch]) -> dict[str, float]:
    """FLOPs of a step, the mean over the batches: of causal attention within documents, of what documents at a time
    compute, and with a dense mask."""
    whole = LENGTH * LENGTH
    base = flops_per_sample(config.model, seq_length=LENGTH, padded_vocab_size=VOCAB, num_logits=LENGTH)
    useful = computed = 0.0
    for batch in batches:
        assert batch.document_ids is not None
        lengths = batch.document_ids.unique(return_counts=True)[1].tolist()
        useful += sum(n * (n + 1) / 2 for n in lengths)
        spec = MaskSpec(length=LENGTH, document_ids_bs=batch.document_ids, device=torch.device("cpu"))
        mask = make_document_mask(spec)
        assert isinstance(mask, DocumentMask)
        computed += sum(
            computed_pairs(segment.length) if segment.mask_11ss is None else segment.length**2
            for segment in mask.rows[0]
        )
    pairs = {"useful": useful / len(batches), "documents": computed / len(batches), "dense mask": whole}
    attention = {
        name: 3 * config.model.num_layers * attention_flops(config.model, pairs=n)
        for name, n in pairs.items()
    }
    return {name: base - attention["dense mask"] + flops for name, flops in attention.items()}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results = run_metadata("packing.py", argv)
    torch.set_num_threads(THREADS)
    keep_freed_memory()
    packed, apart = config_of(PACKED), config_of(APART)
    batches = packed_batches(config.rounds, packed)
    with ExitStack() as stack:
        steps = {
            "documents": stack.enter_context(training(packed, batches, None)),
            "dense mask": stack.enter_context(training(packed, batches, make_mask)),
            f"{MEAN} tokens apart": stack.enter_context(
                training(apart, batches_apart(config.rounds, apart), None)
            ),
        }
        for step in steps.values():
            step(0)  # compiles
        rounds = [{name: step(i) for name, step in steps.items()} for i in range(config.rounds)]
    flops = count_flops(packed, batches)
    results["FLOPs of a step"] = flops
    results["seconds of a step"] = {
        name: round(statistics.median(times[name] for times in rounds), 3) for name in steps
    }
    ratios = {}
    for name in list(steps)[1:]:
        ratio = statistics.median(times[name] / times["documents"] for times in rounds)
        ratios[f"time of {name} / documents"] = round(ratio, 3)
    ratios["FLOPs computed / useful"] = round(flops["documents"] / flops["useful"], 3)
    results |= {"ratios": ratios, "goals": {"speed": SPEED_GOAL, "FLOPs": FLOPS_GOAL}}
    for name, ratio in ratios.items():
        print(f"{name}: {ratio}")
    print(f"goals: {SPEED_GOAL} times the speed of the dense mask, {FLOPS_GOAL} times the useful FLOPs")
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
