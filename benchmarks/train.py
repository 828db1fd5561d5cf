"""Training steps against what a user would pick instead: nanoGPT and transformers, on the same sizes and tokens.

    python benchmarks/train.py --nanogpt DIR [--sizes small ...] [--precisions bf16 fp32] [--rounds N] [--device cuda]

DIR is a checkout of nanoGPT; without it, it is left out. transformers' Trainer, which is compared on a CPU, needs
accelerate: pip install accelerate. Every side has a process of its own with the same threads and
trains on the same random tokens with AdamW and clipping, without dropout. Steps are interleaved, so that all meet the
same moods of the machine, and ratios are medians of the rounds'. The rate of the largest products that the machine was
seen to do is measured in the same rounds.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import queue
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from parallel import about
from parallel_workers import Workers
from torch import Tensor, nn

from megatron.arguments import parse_run_config
from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.data.gpt_dataset import GPTBatch
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.model.flops import flops_per_sample
from megatron.ops.cpu.linear import has_onednn, onednn_matmul
from megatron.ops.cpu.malloc import keep_freed_memory
from megatron.parallel.mesh import choose_device, init_mesh
from megatron.training.cuda_graph import WARM_UP
from megatron.training.engine import Engine
from pretrain_gpt import DEFAULTS, GPT


@dataclasses.dataclass(frozen=True)
class Size:
    """A GPT-2 of `layers` layers, and a microbatch of it."""

    layers: int
    hidden: int
    heads: int
    length: int
    batch: int
    vocab: int


SIZES = {
    "tiny": Size(2, 64, 4, 128, 2, 512),  # to try this file
    "small": Size(6, 512, 8, 512, 8, 8192),
    "355m": Size(24, 1024, 16, 1024, 16, 50304),
    "1.3b": Size(24, 2048, 16, 2048, 4, 50304),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LR, WEIGHT_DECAY, CLIP = 1e-4, 0.1, 1.0
THREADS = 2
# The first steps compile, take memory and capture a graph.
UNSEEN = WARM_UP + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """What to measure, and how often."""

    nanogpt: str | None = flag(None, "checkout of nanoGPT", metavar="DIR")
    device: str = flag("cpu", "where to compute", choices=("cpu", "cuda"))
    sizes: tuple[str, ...] = flag(("small",), "models to measure", choices=tuple(SIZES), nargs="+")
    precisions: tuple[str, ...] = flag(
        ("bf16", "fp32"), "what to compute in", choices=tuple(DTYPES), nargs="+"
    )
    rounds: int = flag(7, "steps of each side, one after the other", low=1)
    output: str = flag(str(ROOT / "benchmarks/results/train.json"), "where results go", metavar="FILE")


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    if config.nanogpt is not None and not (Path(config.nanogpt) / "model.py").is_file():
        raise InputError(f"--nanogpt: {config.nanogpt} holds no model.py; give a checkout of nanoGPT")
    if config.device == "cpu" and importlib.util.find_spec("accelerate") is None:
        raise InputError(
            "transformers' Trainer needs accelerate, which is not installed: pip install accelerate"
        )
    results = about("train.py", argv)
    for name in config.sizes:
        for precision in config.precisions:
            results[f"{name}, {precision}, {config.device}"] = found = compare(config, SIZES[name], precision)
            print(f"{name}, {precision}, {config.device}:")
            for side, values in found.items():
                print(
                    f"  {side:24} " + "  ".join(f"{key} {value:,}" for key, value in values.items()),
                    flush=True,
                )
            Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def compare(config: BenchmarkConfig, size: Size, precision: str) -> dict[str, dict[str, float]]:
    """What each side needs for a step, and our speed over it."""
    sides: dict[str, tuple[Callable, tuple]] = {
        "ours": (ours, ()),
        "ours, plain": (ours, ("--ops-backend", "plain")),
    }
    if config.device == "cuda" and size is SIZES["small"]:
        sides["ours, CUDA graph"] = (ours, ("--cuda-graph",))
    if config.nanogpt is not None:
        sides["nanoGPT, compiled"] = (theirs, ("nanogpt", config.nanogpt, True))
    if config.device == "cpu":
        sides["transformers"] = (theirs, ("transformers", None, False))
        sides["transformers' Trainer"] = (trainer, ())
    sides["transformers, compiled"] = (theirs, ("transformers", None, True))
    sides["largest products"] = (products, ())
    workers = {
        side: Workers(measure, 1, config.device, size, precision, *arguments, threads=THREADS)
        for side, (measure, arguments) in sides.items()
    }
    try:
        rounds = [
            {side: run.next()[0] for side, run in workers.items()} for _ in range(config.rounds + UNSEEN)
        ]
    finally:
        for run in workers.values():
            run.__exit__()
    rounds = rounds[UNSEEN:]
    peak = max(r.pop("largest products")[0] for r in rounds)
    return {
        side: summary(rounds, side, size, flops(config.device, size, precision), peak) for side in rounds[0]
    } | {"largest products": {"TFLOP/s": round(peak / 1e12, 3)}}


def summary(rounds: list[dict], side: str, size: Size, work: float, peak: float) -> dict[str, float]:
    seconds = statistics.median(r[side][0] for r in rounds)
    return {
        "seconds": round(seconds, 4),
        "tokens/s": round(size.batch * size.length / seconds),
        "ours over it": round(statistics.median(r[side][0] / r["ours"][0] for r in rounds), 3),
        "of the largest products": round(work / seconds / peak, 3),
        "peak MB": round(rounds[-1][side][1]),
        "loss": round(rounds[-1][side][2], 3),
    }


def run_flags(device: str, size: Size, precision: str) -> list[str]:
    return f"""
        --mock-data --tokenizer-type NullTokenizer --vocab-size {size.vocab - 1} --train-iters 100 --num-workers 0
        --num-layers {size.layers} --hidden-size {size.hidden} --num-attention-heads {size.heads} --lr {LR}
        --seq-length {size.length} --micro-batch-size {size.batch} --hidden-dropout 0 --attention-dropout 0
        --clip-grad {CLIP} --device {device} {"--bf16" if precision == "bf16" else ""}
    """.split()


def flops(device: str, size: Size, precision: str) -> float:
    """Of a step, by the paper's formula (arXiv 2104.04473 equation 3, nothing recomputed)."""
    config = parse_run_config(run_flags(device, size, precision), description="", defaults=DEFAULTS)
    return size.batch * flops_per_sample(
        config.model, seq_length=size.length, padded_vocab_size=size.vocab, num_logits=size.length
    )


def tokens(size: Size) -> Tensor:
    return torch.randint(
        size.vocab - 1, (size.batch, size.length + 1), generator=torch.Generator().manual_seed(1)
    )


class Meter:
    """Seconds of a block, and the most megabytes held since this was made."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.before = 0.0
        self.before = self.megabytes()

    def megabytes(self) -> float:
        if self.cuda:
            return torch.cuda.max_memory_allocated() / 1e6
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6 - self.before

    def time(self, step: Callable[[], Tensor]) -> tuple[float, float, float]:
        begin = time.perf_counter()
        loss = step().item()  # which waits for the device
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, self.megabytes(), loss


def ours(device: str, size: Size, precision: str, *more: str) -> Iterator[tuple[float, float, float]]:
    """Of each step seconds, megabytes at most and loss."""
    if device == "cpu":
        keep_freed_memory()
    meter = Meter(device)
    with training(device, size, precision, *more) as (_, step):
        while True:
            yield meter.time(step)


@contextmanager
def training(
    device: str, size: Size, precision: str, *more: str
) -> Iterator[tuple[Engine, Callable[[], Tensor]]]:
    """Our model, and a step of it that gives the loss."""
    config = parse_run_config([*run_flags(device, size, precision), *more], description="", defaults=DEFAULTS)
    with init_mesh(config.parallel, choose_device(device)) as mesh:
        engine = Engine(config, GPT, mesh, vocab_size=size.vocab, padded_vocab_size=size.vocab)
        engine.buffer.initialize(1)
        ids = tokens(size)
        batch = GPTBatch(
            tokens=ids[:, :-1].contiguous(),
            labels=ids[:, 1:].contiguous(),
            loss_mask=torch.ones(size.batch, size.length),
            position_ids=torch.arange(size.length).expand(size.batch, -1),
        )

        def step() -> Tensor:
            return engine.train_step(
                iter([batch]), num_microbatches=1, consumed_samples=0, lr=LR, weight_decay=WEIGHT_DECAY
            )[0].sum()

        yield engine, step


def theirs(
    device: str, size: Size, precision: str, package: str, folder: str | None, compiled: bool
) -> Iterator[tuple[float, float, float]]:
    """The same of a model of theirs in nanoGPT's step: fp32 weights, autocast, AdamW, clipping."""
    meter = Meter(device)
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model, loss_of = nanogpt(folder, size) if package == "nanogpt" else transformers_gpt2(size)
    model = model.to(device).train()
    decays = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decays, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=LR,
        fused=True,
    )
    run = torch.compile(model) if compiled else model
    ids = tokens(size).to(device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> Tensor:
        with torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext():
            loss = loss_of(run, x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    while True:
        yield meter.time(step)


def trainer(device: str, size: Size, precision: str) -> Iterator[tuple[float, float, float]]:
    """The same by transformers' Trainer and its own loss. Its loop has a thread, and waits there after every step."""
    meter = Meter(device)
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
    ):  # with which it would take itself for one of several processes
        os.environ.pop(name)
    import transformers

    model, _ = transformers_gpt2(size)
    turns, losses = queue.SimpleQueue(), queue.SimpleQueue()

    class Stepwise(transformers.Trainer):
        def training_step(self, *arguments: Any) -> Tensor:
            self.loss = super().training_step(*arguments)
            return self.loss

    class Waits(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            losses.put(loop.loss)
            turns.get()

    samples = [{"input_ids": ids, "labels": ids} for ids in tokens(size)[:, :-1]]
    loop = Stepwise(
        model,
        transformers.TrainingArguments(
            tempfile.mkdtemp(),
            max_steps=10**6,
            per_device_train_batch_size=size.batch,
            train_sampling_strategy="sequential",
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP,
            bf16=precision == "bf16",
            use_cpu=device == "cpu",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=samples * 1000,
        callbacks=[Waits()],
    )

    def run() -> None:
        torch.set_num_threads(THREADS)  # which is a thread's own
        turns.get()
        try:
            loop.train()
        except Exception as error:
            losses.put(error)

    def step() -> Tensor:
        turns.put(None)
        loss = losses.get()
        if isinstance(loss, Exception):
            raise loss
        return loss

    threading.Thread(target=run, daemon=True).start()
    while True:
        yield meter.time(step)


def nanogpt(folder: str, size: Size) -> tuple[nn.Module, Callable[..., Tensor]]:
    sys.path.insert(0, folder)
    import model

    config = model.GPTConfig(
        block_size=size.length,
        vocab_size=size.vocab,
        n_layer=size.layers,
        n_head=size.heads,
        n_embd=size.hidden,
        dropout=0.0,
        bias=True,
    )
    return model.GPT(config), lambda run, x, y: run(x, y)[1]


def transformers_gpt2(size: Size) -> tuple[nn.Module, Callable[..., Tensor]]:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=size.vocab,
        n_positions=size.length,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )

    def loss_of(run: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(run(x).logits.flatten(0, 1), y.flatten())

    return transformers.GPT2LMHeadModel(config), loss_of


def products(device: str, size: Size, precision: str) -> Iterator[tuple[float]]:
    """Floating-point operations a second of the fastest of some large products."""
    dtype = DTYPES[precision]
    n = 8192 if device == "cuda" else 2048
    shapes = ((n, n, n), (size.batch * size.length, size.hidden, 4 * size.hidden))
    forms: list[Callable[..., Any]] = [nn.functional.linear]
    if device == "cpu" and has_onednn(dtype):
        forms.append(lambda x, w: onednn_matmul(x, w))
    cases = [
        (form, torch.randn(m, k, dtype=dtype, device=device), torch.randn(out, k, dtype=dtype, device=device))
        for m, k, out in shapes
        for form in forms
    ]
    while True:
        best = 0.0
        for form, x, w in cases:
            for _ in range(5):
                begin = time.perf_counter()
                form(x, w)
                if device == "cuda":
                    torch.cuda.synchronize()
                best = max(best, 2 * x.numel() * len(w) / (time.perf_counter() - begin))
        yield (best,)


if __name__ == "__main__":
    run_command(main)
