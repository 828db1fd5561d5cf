"""The programs whose training steps `benchmarks/train.py` compares."""

from __future__ import annotations

import dataclasses
import os
import queue
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor, nn

import megatron.plugins  # noqa: F401 (registers compiled layers)
from megatron.arguments import parse_run_config
from megatron.data.gpt_dataset import GPTBatch
from megatron.model.flops import flops_per_sample
from megatron.ops.cpu.linear import has_onednn, onednn_matmul
from megatron.ops.cpu.malloc import keep_freed_memory
from megatron.parallel.mesh import choose_device, init_mesh
from megatron.performance.config import PerformanceConfig
from megatron.performance.cuda_graph import use_cuda_graph
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training.build import build_engine
from megatron.training.engine import Engine


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of a GPT-2 and of its microbatch."""

    layers: int
    hidden: int
    heads: int
    length: int
    batch: int
    vocab: int


SIZES = {
    "tiny": Size(2, 64, 4, 128, 2, 512),  # to test this script
    "small": Size(6, 512, 8, 512, 8, 8192),
    "355m": Size(24, 1024, 16, 1024, 16, 50304),
    "1.3b": Size(24, 2048, 16, 2048, 4, 50304),
    # 8 of the 32 layers of a model with 7 billion parameters, whose optimizer state a GPU does not hold.
    "7b": Size(8, 4096, 32, 4096, 1, 50304),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LR, WEIGHT_DECAY, CLIP = 1e-4, 0.1, 1.0
THREADS = 2


def run_flags(device: str, size: Size, precision: str) -> list[str]:
    return f"""
        --mock-data --tokenizer-type NullTokenizer --vocab-size {size.vocab - 1} --train-iters 100 --num-workers 0
        --num-layers {size.layers} --hidden-size {size.hidden} --num-attention-heads {size.heads} --lr {LR}
        --seq-length {size.length} --micro-batch-size {size.batch} --hidden-dropout 0 --attention-dropout 0
        --clip-grad {CLIP} --device {device} {"--bf16" if precision == "bf16" else ""}
    """.split()


def flops(device: str, size: Size, precision: str) -> float:
    """FLOPs per step by arXiv 2104.04473 equation 3, without recomputation."""
    config = parse_run_config(run_flags(device, size, precision), description="", defaults=DEFAULTS)
    return size.batch * flops_per_sample(
        config.model, seq_length=size.length, padded_vocab_size=size.vocab, num_logits=size.length
    )


def tokens(size: Size) -> Tensor:
    return torch.randint(
        size.vocab - 1, (size.batch, size.length + 1), generator=torch.Generator().manual_seed(1)
    )


class Meter:
    """Measures the seconds of a step and the peak memory since construction."""

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
        loss = step().item()  # synchronizes the device
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, self.megabytes(), loss


def ours(device: str, size: Size, precision: str, *more: str) -> Iterator[tuple[float, float, float]]:
    """Train our model. Yields seconds, peak MB and loss of each step."""
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
    """Context with our engine, and a function that runs one step and returns the loss."""
    config = parse_run_config([*run_flags(device, size, precision), *more], description="", defaults=DEFAULTS)
    with init_mesh(config.parallel, choose_device(device)) as mesh:
        engine = build_engine(config, GPT, mesh, vocab_size=size.vocab, padded_vocab_size=size.vocab)
        if config.plugin(PerformanceConfig).cuda_graph:
            use_cuda_graph(engine)
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


def baseline(
    device: str, size: Size, precision: str, package: str, folder: str | None, compiled: bool
) -> Iterator[tuple[float, float, float]]:
    """Train a baseline model with nanoGPT's step: fp32 weights, autocast, AdamW, clipping. Yields as `ours` does."""
    meter = Meter(device)
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model, loss_of = nanogpt(folder, size) if package == "nanogpt" else transformers_gpt2(size)
    model = model.to(device).train()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
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


def hf_trainer(device: str, size: Size, precision: str) -> Iterator[tuple[float, float, float]]:
    """Train with transformers' Trainer and its own loss. Its loop runs in a thread and waits after every step."""
    meter = Meter(device)
    # With these variables, Trainer would run as one of several processes.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)
    import transformers

    model, _ = transformers_gpt2(size)
    turns, losses = queue.SimpleQueue(), queue.SimpleQueue()

    class SteppedTrainer(transformers.Trainer):
        def training_step(self, *arguments: Any) -> Tensor:
            self.loss = super().training_step(*arguments)
            return self.loss

    class WaitAfterStep(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            losses.put(trainer.loss)
            turns.get()

    samples = [{"input_ids": ids, "labels": ids} for ids in tokens(size)[:, :-1]]
    trainer = SteppedTrainer(
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
        callbacks=[WaitAfterStep()],
    )

    def run() -> None:
        torch.set_num_threads(THREADS)  # a setting per thread
        turns.get()
        try:
            trainer.train()
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


def matmul_rate(device: str, size: Size, precision: str) -> Iterator[tuple[float]]:
    """Yield the FLOP/s of the fastest of several large matmuls."""
    dtype = DTYPES[precision]
    n = 8192 if device == "cuda" else 2048
    shapes = ((n, n, n), (size.batch * size.length, size.hidden, 4 * size.hidden))
    matmuls: list[Callable[..., Any]] = [nn.functional.linear]
    if device == "cpu" and has_onednn(dtype):
        matmuls.append(lambda x, w: onednn_matmul(x, w))
    cases = [
        (
            matmul,
            torch.randn(m, k, dtype=dtype, device=device),
            torch.randn(out, k, dtype=dtype, device=device),
        )
        for m, k, out in shapes
        for matmul in matmuls
    ]
    while True:
        best = 0.0
        for matmul, x, w in cases:
            for _ in range(5):
                begin = time.perf_counter()
                matmul(x, w)
                if device == "cuda":
                    torch.cuda.synchronize()
                best = max(best, 2 * x.numel() * len(w) / (time.perf_counter() - begin))
        yield (best,)
