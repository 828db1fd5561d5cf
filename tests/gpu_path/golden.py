"""Golden numbers of a transformer layer on a GPU: kernels and bytes, forward and backward.

PYTHONPATH=.:tests python tests/gpu_path/golden.py [--check]

Writes golden.json, and prints the numbers beside the goals; --check compares without writing, and names the shapes
whose numbers differ.
"""

from __future__ import annotations

import collections
import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_path.layer_trace import Operation, per_layer, trace

from megatron.arguments import parse_run_config
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training.config import RunConfig

if TYPE_CHECKING:
    from gpu_path.compiled_trace import Compiled

FILE = Path(__file__).with_name("golden.json")
# Kernels besides matrix products and attention of a compiled GPT-2 layer with dropout, and bytes over those of
# `hand_count`.
GOALS = {"forward": 6, "backward": 16}
BYTES_GOAL = 1.3
# Major and minor version, which decides how many operations some functions are.
TORCH = ".".join(torch.__version__.split(".")[:2])

COMMON = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 50303 --train-iters 1 --lr 1e-4 --bf16
    --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 8 --global-batch-size 8
"""
SHAPES = {
    "GPT-2": "",
    "GPT-2 without dropout": "--hidden-dropout 0 --attention-dropout 0",
    "Llama": "--hidden-dropout 0 --attention-dropout 0 --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --ffn-hidden-size 2816 --group-query-attention --num-query-groups 4 --disable-bias-linear "
    "--untie-embeddings-and-output-weights",
    "BERT": "--seq-length 512",
}


def config_of(shape: str, layers: int, more: str = "") -> RunConfig:
    flags = f"{COMMON} {SHAPES[shape]} --num-layers {layers} {more}".split()
    return parse_run_config(flags, description="", defaults={} if shape == "BERT" else DEFAULTS)


@functools.cache
def operations(shape: str) -> tuple[list[Operation], list[Operation]]:
    """Operations of one layer, uncompiled but for some functions, and of the model without layers."""
    task = bert(binary_head=True) if shape == "BERT" else GPT
    shallow, deep = (trace(config_of(shape, layers), task) for layers in (2, 3))
    layer = per_layer(shallow, deep)
    return layer, per_layer(layer + layer, shallow)


@functools.cache
def compiled(shape: str, more: str = "") -> Compiled:
    """One layer that torch.compile compiles as a whole."""
    from gpu_path.compiled_trace import compiled_layer  # its parts of Inductor depend on torch's version

    return compiled_layer(config_of(shape, 1, more), causal=shape != "BERT")


def measure(shape: str) -> dict[str, dict[str, dict[str, int]]]:
    """The golden numbers of a shape, as a dry run counts them."""
    layer, rest = operations(shape)
    return {"layer": numbers(layer), "embedding and loss": numbers(rest)}


def measure_compiled(shape: str) -> dict[str, dict[str, int]]:
    """The golden numbers of a shape's compiled layer."""
    return numbers(compiled(shape).operations)


def numbers(operations: list[Operation]) -> dict[str, dict[str, int]]:
    """Kernels by name and bytes by kind, for each direction."""
    found = {}
    for direction in ("forward", "backward"):
        mine = [operation for operation in operations if operation.direction == direction]
        names = collections.Counter(operation.name for operation in mine)
        size: collections.Counter[str] = collections.Counter()
        for operation in mine:
            size[f"bytes of {operation.kind}"] += operation.bytes
        found[direction] = dict(sorted(names.items())) | dict(sorted(size.items()))
    return found


def kernels(operations: list[Operation], direction: str) -> int:
    """Kernels besides matrix products and attention; an operation counts as one."""
    return sum(operation.kind == "other" and operation.direction == direction for operation in operations)


def other_bytes(operations: list[Operation]) -> int:
    """Bytes of all but matrix products and attention, forward and backward."""
    return sum(operation.bytes for operation in operations if operation.kind == "other")


def hand_count(config: RunConfig) -> int:
    """Bytes that the kernels between products and attention of a layer must read and write if fused as far as it goes.

    In units of one activation [s, b, h] of the residual stream, with f the MLP's width and k that of keys over h:

    forward: norm 2; residual, dropout and second norm 4; activation (gate and) input and output; residual 3; RoPE
    reads and writes queries and keys.
    backward: activation reads the output's gradient and the input, writes the input's gradient; each norm with the
    residual's gradient 4; gradients of queries, keys and values, with RoPE's, move into one matrix; each dropout writes
    the gradient of its input, which for the last one reads its output's too. Sums of gradients of biases and norms are
    part of the kernels that have the gradient in registers, and masks are drawn again.
    """
    model = config.model
    activation = config.data.seq_length * config.training.micro_batch_size * model.hidden_size * 2
    f = model.ffn_hidden_size / model.hidden_size
    k = model.num_query_groups * model.kv_channels / model.hidden_size
    rope = 2 * (1 + k) if model.position_embedding_type == "rope" else 0
    forward = 2 + rope + 4 + (3 if model.gated else 2) * f + 3
    dropout = 3 if model.hidden_dropout > 0 else 0
    backward = (5 if model.gated else 3) * f + 4 + 4 + 2 * (1 + 2 * k) + dropout
    return round((forward + backward) * activation)


def main() -> int:
    found: dict[str, Any] = {"torch": TORCH, "shapes": {shape: measure(shape) for shape in SHAPES}}
    found["compiled layers"] = {shape: measure_compiled(shape) for shape in SHAPES}
    print(table())
    if sys.argv[1:] == ["--check"]:
        golden = json.loads(FILE.read_text(encoding="utf-8"))
        differ = differences(golden, found)
        print("\n".join(differ) or f"all numbers are those of {FILE.name}")
        return int(bool(differ))
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def differences(golden: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """One line for each shape whose numbers are not the golden ones, or one for another version of torch."""
    if golden["torch"] != found["torch"]:
        return [f"{FILE.name} has the numbers of torch {golden['torch']}, and this is {found['torch']}"]
    return [
        f"{kind}, {shape}: {FILE.name} has {golden[kind].get(shape)}, found {numbers}"
        for kind in ("shapes", "compiled layers")
        for shape, numbers in found[kind].items()
        if golden[kind].get(shape) != numbers
    ]


def table() -> str:
    """Kernels and bytes of a layer of each shape, besides matrix products and attention, and the goals of compiled
    ones."""
    rows = [f"{'':34}{'kernels':>10}{'goal':>8}{'GB':>8}{'over hand count':>18}{'goal':>6}"]
    for shape in SHAPES:
        for name, layer in (
            (shape, operations(shape)[0]),
            (f"{shape}, compiled", compiled(shape).operations),
        ):
            counts = "+".join(str(kernels(layer, direction)) for direction in GOALS)
            size = other_bytes(layer)
            ratio = size / hand_count(config_of(shape, 1))
            goal = "+".join(map(str, GOALS.values())) if name == "GPT-2, compiled" else ""
            bytes_goal = BYTES_GOAL if name.endswith("compiled") else ""
            rows.append(f"{name:34}{counts:>10}{goal:>8}{size / 1e9:8.2f}{ratio:18.2f}{bytes_goal:>6}")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
