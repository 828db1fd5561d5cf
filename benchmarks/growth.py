"""Measure how costs grow with sizes, and how they compare with plain programs.

    python benchmarks/growth.py [--only NAME ...]

Each item runs at three sizes, each in a new process with one thread. An item of kind "growth" has an exponent: the
logarithm of the growth of its cost, from the smallest size to the largest, over that of the work; 1 is linear and 0 is
constant. An item of kind "ratio" has the cost relative to that of the plain program, the largest of the three. Seconds
are of CPU time, except those of saving and verifying, which have threads and wait for the disk. The whole takes a few
minutes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import torch
from gpt_index import make_data
from parallel import run_metadata
from parallel_steps import COMMON, NO_DROPOUT, start_run
from plain_gpt import PlainGPT
from plain_gpt import train as train_plainly
from safetensors.torch import save_file
from train_sides import Size, flops, tokens, training

import megatron.plugins  # noqa: F401 (registers sources of data)
from megatron.arguments import parse_run_config
from megatron.checkpoint.checkpoint import open_checkpoint
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.load import load_into
from megatron.checkpoint.save import Saver, take_snapshot
from megatron.checkpoint.storage import sync
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import build_gpt_datasets
from megatron.data.gpt_index import load_or_build
from megatron.data.index_cache import IndexRequest
from megatron.data.indexed import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.flags import Config, flag
from megatron.ops.cpu.malloc import keep_freed_memory
from megatron.planner.dry_run import DryRun
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.variants.blend import blend_order

ROUNDS = 5
SAVED_MODEL = f"""
    {COMMON} {NO_DROPOUT} --device cpu --num-layers 4 --num-attention-heads 8 --seq-length 64 --vocab-size 2047
    --micro-batch-size 1 --global-batch-size 1
"""
DRY_RUN = f"""
    {COMMON} --device cuda --bf16 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 2047
    --micro-batch-size 1 --global-batch-size 16
"""


@dataclasses.dataclass(frozen=True)
class Item:
    """A cost at three sizes.

    Attributes:
        kind: "growth" or "ratio".
        goal: largest exponent or ratio.
        sizes: arguments of `measure`.
        measure: returns the cost at a size, and the work or the cost of the plain program.
    """

    kind: str
    goal: float
    size: str
    sizes: tuple[int, ...]
    measure: Callable[[int], tuple[float, float]]

    def result(self, pairs: list[tuple[float, float]]) -> float:
        if self.kind == "ratio":
            return max(cost / plain for cost, plain in pairs)
        (first, less), (last, more) = pairs[0], pairs[-1]
        return math.log(last / first) / math.log(more / less)


def cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def alternating(ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, float]:
    """Median costs of both, which take turns after a first run that is not measured."""
    rounds = [(ours(), theirs()) for _ in range(1 + ROUNDS)][1:]
    mine, other = zip(*rounds, strict=True)
    return statistics.median(mine), statistics.median(other)


def preprocess(documents: int, megabytes: float) -> tuple[float, float]:
    """CPU seconds and peak MB of tools/preprocess_data.py for documents of so many MB."""
    words = [f"w{i * 7919 % 10007}" for i in range(5000)]
    text = " ".join(itertools.islice(itertools.cycle(words), int(megabytes * 1e6 / 6)))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        with corpus.open("w", encoding="utf-8") as file:
            for _ in range(documents):
                file.write(json.dumps({"text": text}) + "\n")
        (Path(folder) / "sample.txt").write_text("\n".join(words), encoding="utf-8")
        vocabulary = ["--vocab-file", f"{folder}/vocab.json", "--merge-file", f"{folder}/merges.txt"]
        tool("train_tokenizer", "--input", f"{folder}/sample.txt", "--type", "bpe", "--vocab-size", "500",
             "--output", folder)  # fmt: skip
        usage = tool("preprocess_data", "--input", str(corpus), "--output-prefix", f"{folder}/out", "--workers", "1",
                     "--tokenizer-type", "GPT2BPETokenizer", *vocabulary)  # fmt: skip
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def tool(name: str, *flags: str) -> resource.struct_rusage:
    """Run a tool. Returns what its process and the children that it waited for used."""
    with open(os.devnull, "wb") as null:
        process = subprocess.Popen([sys.executable, str(ROOT / f"tools/{name}.py"), *flags], stdout=null)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"tools/{name}.py failed"
    return usage


def preprocessing(megabytes: int) -> tuple[float, float]:
    return preprocess(megabytes * 50, 0.02)[0], megabytes


def document_size(megabytes: int) -> tuple[float, float]:
    return preprocess(1, megabytes)[1], megabytes


def descriptors(corpora: int) -> tuple[float, float]:
    """Descriptors that are open with a blend of so many corpora, each split in three; 1,024 are allowed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    with tempfile.TemporaryDirectory() as folder:
        for i in range(corpora):
            with IndexedDatasetWriter(Path(folder) / f"corpus{i}", np.uint16) as writer:
                for _ in range(30):
                    writer.add_document([np.arange(30)])
        config = DataConfig(
            data_path=tuple(f"{folder}/corpus{i}" for i in range(corpora)),
            split="8,1,1",
            seq_length=8,
            data_cache_path=f"{folder}/cache",
        )
        datasets = build_gpt_datasets(
            config, samples=(10 * corpora, corpora, corpora), seed=1, vocab_size=100
        )
        assert len(datasets) == 3
        return len(os.listdir("/proc/self/fd")), corpora


def index(documents: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder) / "data", documents, 512)

        def build() -> None:
            dataset = IndexedDataset(f"{folder}/data")
            samples = (dataset.num_tokens - 1) // 1024
            request = IndexRequest(
                dataset=dataset,
                documents=range(documents),
                split="train",
                samples=samples,
                seed=1234,
                cache=f"{folder}/cache",
            )
            load_or_build(request, 1024)

        return cpu_seconds(build), documents


def blend(corpora: int) -> tuple[float, float]:
    samples = 200_000
    return cpu_seconds(lambda: blend_order(range(1, corpora + 1), samples)), samples * corpora


@contextmanager
def saver_of(hidden: int) -> Iterator[tuple[Saver, Path]]:
    """Context with the saver of a run that has made a step, and its folder."""
    with (
        tempfile.TemporaryDirectory(dir=ROOT) as folder,
        start_run(f"{SAVED_MODEL} --hidden-size {hidden}") as run,
    ):
        run.step()
        buffer, optimizer = run.engine.buffer, run.engine.optimizer
        yield Saver(CheckpointConfig(save=folder), buffer, optimizer, {}, log=lambda _: None), Path(folder)


def saving(hidden: int) -> tuple[float, float]:
    """Seconds of a save, and of save_file for the same two files, which are synced too. Both are new files."""
    with saver_of(hidden) as (saver, root):
        groups = take_snapshot(saver.config, {}, saver.buffer, saver.optimizer).tensors

        def ours() -> float:
            begin = time.perf_counter()
            saver.save({"iteration": 1})
            seconds = time.perf_counter() - begin
            shutil.rmtree(root / "iter_0000001")
            return seconds

        def theirs() -> float:
            begin = time.perf_counter()
            for kind, group in groups.items():
                tensors = {f"{prefix}{i}": t for prefix, parts in group.items() for i, t in enumerate(parts)}
                save_file(tensors, root / kind)
                sync(root / kind)
            seconds = time.perf_counter() - begin
            for kind in groups:
                (root / kind).unlink()
            return seconds

        return alternating(ours, theirs)


def verifying(hidden: int) -> tuple[float, float]:
    """Seconds of a checkpoint's checksums, and of loading it without them, both from the page cache."""
    with saver_of(hidden) as (saver, root):
        counts = ("iteration", "consumed_samples", "train_samples", "vocab_size", "padded_vocab_size")
        saver.save(dict.fromkeys(counts, 1) | {"optimizer_steps": 1, "task": "GPT", "config": {}})
        checkpoint = open_checkpoint(root / "iter_0000001")

        def seconds(work: Callable[[], object]) -> float:
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin

        return alternating(
            lambda: seconds(checkpoint.verify),
            lambda: seconds(lambda: load_into(checkpoint, saver.buffer, saver.optimizer)),
        )


def tiny_iteration(hidden: int) -> tuple[float, float]:
    """CPU seconds of ten iterations, and of ten of a loop in plain PyTorch for the same model and batch."""
    size = Size(layers=2, hidden=hidden, heads=4, length=64, batch=4, vocab=512)
    plain = PlainGPT(vocab_size=size.vocab, width=hidden, heads=4, layers=2, length=size.length)
    settings = {"lr": 1e-4, "min_lr": 1e-5, "warmup": 10, "weight_decay": 0.1, "clip": 1.0}
    loop = train_plainly(plain, itertools.repeat(tokens(size)), steps=10**6, **settings)
    with training("cpu", size, "fp32") as (_, step):
        return alternating(
            lambda: cpu_seconds(lambda: [step().item() for _ in range(10)]),
            lambda: cpu_seconds(lambda: [next(loop) for _ in range(10)]),
        )


def vocabulary(vocab: int) -> tuple[float, float]:
    """CPU seconds of a step, and its FLOPs by the paper's formula."""
    size = Size(layers=2, hidden=256, heads=4, length=256, batch=8, vocab=vocab)
    with training("cpu", size, "fp32") as (_, step):
        step().item()
        seconds = [cpu_seconds(lambda: step().item()) for _ in range(ROUNDS)]
    return statistics.median(seconds), flops("cpu", size, "fp32")


def dry_run(layers: int) -> tuple[float, float]:
    config = parse_run_config(f"{DRY_RUN} --num-layers {layers}".split(), description="", defaults=DEFAULTS)
    run = DryRun.from_config(config, GPT, 1)
    return cpu_seconds(lambda: run.count(0)), layers


ITEMS = {
    "preprocessing": Item("growth", 1.05, "MB of text", (2, 8, 32), preprocessing),
    "memory by document": Item("growth", 1.0, "MB a document", (1, 4, 16), document_size),
    "descriptors of a blend": Item("growth", 0.05, "corpora", (10, 100, 1000), descriptors),
    "sample index": Item("growth", 1.2, "documents", (10**5, 10**6, 10**7), index),
    "blend order": Item("growth", 1.0, "corpora", (10, 50, 250), blend),
    "save / save_file": Item("ratio", 1.3, "hidden size", (512, 1024, 1536), saving),
    "verify / load": Item("ratio", 1.5, "hidden size", (512, 1024, 1536), verifying),
    "tiny iteration / plain loop": Item("ratio", 1.05, "hidden size", (32, 64, 128), tiny_iteration),
    "step by vocabulary": Item("growth", 1.05, "ids", (8192, 16384, 32768), vocabulary),
    "dry run": Item("growth", 1.0, "layers", (4, 8, 16), dry_run),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    only: tuple[str, ...] = flag((), "items to measure (default: all)", choices=tuple(ITEMS), nargs="+")
    output: str = flag(
        str(ROOT / "benchmarks/results/growth.json"),
        "file to write the results to; those of other items are kept",
        metavar="FILE",
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    output = Path(config.output)
    results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    for name in config.only or ITEMS:
        item = ITEMS[name]
        run = run_metadata("growth.py", argv)
        pairs = [in_new_process(name, size) for size in item.sizes]
        result = item.result(pairs)
        print(f"{name}: {item.kind} {result:.2f} (goal {item.goal:g})", flush=True)
        results[name] = {item.kind: round(result, 3), "goal": item.goal}
        results[name] |= {item.size: dict(zip(map(str, item.sizes), pairs, strict=True)), "run": run}
        output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def in_new_process(name: str, size: int) -> tuple[float, float]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare) as pool:
        cost, work = pool.submit(measure, name, size).result()
    return float(f"{cost:.4g}"), float(f"{work:.4g}")


def prepare() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()


def measure(name: str, size: int) -> tuple[float, float]:
    return ITEMS[name].measure(size)


if __name__ == "__main__":
    run_command(main)
