"""Measure the host's time for a layer, forward and backward, against an eager layer of nn.Module.

    python benchmarks/host.py [--rounds N]

Tensors are tiny, so that kernels cost next to nothing. Our layers are compiled as a whole, as on a GPU; the others are
written as nanoGPT and Llama write them. The time of a layer is a sixth of the difference between models of 8 and of 2
layers, in CPU time of the thread that runs both, which take turns. On a CPU generated kernels are called from C++; on a
GPU each is a call in Python that takes a few microseconds, which are not measured here.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from parallel import run_metadata
from torch import Tensor, nn
from train_sides import Size, batch_of, training

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.flags import Config, flag
from megatron.ops.rotary import apply_rotary_emb, rotary_angles

GOAL = 1.2
SHALLOW, DEEP = 2, 8
HIDDEN, HEADS, LENGTH = 64, 4, 8
SHAPES = {
    "GPT-2": (),
    "Llama": (
        "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
        "--untie-embeddings-and-output-weights",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    rounds: int = flag(300, "measured steps of each model", low=1)
    output: str = flag(
        str(ROOT / "benchmarks/results/host.json"), "file to write the results to", metavar="FILE"
    )


class GPT2Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.fc, self.out = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.qkv(self.norm_1(x)).split(HIDDEN, dim=2))
        x = x + self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        )
        return x + self.out(F.gelu(self.fc(self.norm_2(x)), approximate="tanh"))


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v, self.proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(HIDDEN, 4 * HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)
        self.angles = rotary_angles(torch.arange(LENGTH)[None], HIDDEN // HEADS, 10000)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k = (apply_rotary_emb(heads(linear(y)), *self.angles) for linear in (self.q, self.k))
        v = heads(self.v(y))
        x = x + self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        )
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


EAGER = {"GPT-2": GPT2Layer, "Llama": LlamaLayer}


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, HIDDEN // HEADS).transpose(1, 2)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    torch.set_num_threads(1)
    results = run_metadata("host.py", argv) | {"goal": GOAL}
    for shape in SHAPES:
        results[shape] = found = compare(shape, config.rounds)
        print(f"{shape}: {found} (goal {GOAL:g})", flush=True)
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def compare(shape: str, rounds: int) -> dict[str, float]:
    """Microseconds of a layer, ours and eager, and their ratio."""
    with ExitStack() as stack:
        steps = {
            (side, layers): make(shape, layers, stack)
            for side, make in (("ours", ours), ("eager", eager))
            for layers in (SHALLOW, DEEP)
        }
        times: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
        for _ in range(rounds + 10):  # the first compile, and allocate memory
            for key, step in steps.items():
                begin = time.thread_time()
                step()
                times[key].append(time.thread_time() - begin)
    medians = {key: statistics.median(seconds[10:]) for key, seconds in times.items()}
    layer = {
        side: (medians[side, DEEP] - medians[side, SHALLOW]) / (DEEP - SHALLOW) * 1e6
        for side in ("ours", "eager")
    }
    return {f"{side}, us": round(time, 1) for side, time in layer.items()} | {
        "ratio": round(layer["ours"] / layer["eager"], 3)
    }


def ours(shape: str, layers: int, stack: ExitStack) -> Callable[[], object]:
    size = Size(layers, HIDDEN, HEADS, LENGTH, batch=1, vocab=128)
    engine, _ = stack.enter_context(training("cpu", size, "fp32", "--ops-backend", "layers", *SHAPES[shape]))
    batch = engine.next_global_batch(iter([batch_of(size)]), 1, 0)
    return lambda: engine.forward_backward(batch)


def eager(shape: str, layers: int, stack: ExitStack) -> Callable[[], object]:
    model = nn.Sequential(*(EAGER[shape]() for _ in range(layers)))
    x = torch.randn(1, LENGTH, HIDDEN)
    return lambda: model(x).sum().backward()


if __name__ == "__main__":
    run_command(main)
