"""Loss curves that were written down, and those of the fast operations against the plain ones.

`PYTHONPATH=. python tests/golden/test_golden.py` writes the curves anew: a change that needs it changes what is
computed, and has to say why.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from megatron.arguments import parse_run_config
from megatron.data.gpt_dataset import GPTBatch
from megatron.parallel.mesh import choose_device, init_mesh
from megatron.training.engine import Engine
from pretrain_gpt import DEFAULTS, GPT

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --train-iters 1 --num-layers 2 --hidden-size 64
    --num-attention-heads 4 --seq-length 128 --micro-batch-size 4 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0
    --device cpu --make-vocab-size-divisible-by 128
"""
LLAMA = """
    --swiglu --ffn-hidden-size 160 --normalization RMSNorm --position-embedding-type rope --group-query-attention
    --num-query-groups 2 --untie-embeddings-and-output-weights --disable-bias-linear
"""
SHAPES = {"GPT-2": "", "Llama": LLAMA}
CURVES = Path(__file__).with_name("curves.json")
STEPS = 40


def curve(flags: str, *, steps: int = STEPS, seed: int = 1) -> list[float]:
    """The loss of every step, on sequences in which each token follows from the last, but one in four that does not."""
    config = parse_run_config([*FLAGS.split(), *flags.split()], description="", defaults=DEFAULTS)
    draw = torch.Generator().manual_seed(0)
    follows = torch.randperm(128, generator=draw)
    losses = []
    with init_mesh(config.parallel, choose_device("cpu")) as mesh:
        engine = Engine(config, GPT, mesh, vocab_size=128, padded_vocab_size=128)
        engine.buffer.initialize(seed)
        for step in range(steps):
            ids = torch.randint(128, (4, 129), generator=draw)
            for i in range(1, 129):
                stays = torch.rand(4, generator=draw) < 0.75
                ids[:, i] = torch.where(stays, follows[ids[:, i - 1]], ids[:, i])
            batch = GPTBatch(
                tokens=ids[:, :-1],
                labels=ids[:, 1:],
                loss_mask=torch.ones(4, 128),
                position_ids=torch.arange(128).expand(4, -1),
            )
            found, _ = engine.train_step(
                iter([batch]), num_microbatches=1, consumed_samples=4 * step, lr=1e-3, weight_decay=0.01
            )
            losses.append(found.sum().item())
    return losses


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operations", ["plain", "auto"])
def test_curve(shape: str, operations: str) -> None:
    """In fp32 all machines agree to some digits, which training makes fewer."""
    golden = json.loads(CURVES.read_text(encoding="utf-8"))[shape]
    ours = curve(f"{SHAPES[shape]} --ops-backend {operations}")
    assert ours == pytest.approx(golden, rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["--bf16", ""])
def test_fast_operations_train_as_well(shape: str, precision: str) -> None:
    """The loss of the compiled operations is as near to that of the plain ones as the plain ones' of other seeds."""

    def ends(operations: str) -> list[float]:
        flags = f"{SHAPES[shape]} {precision} --ops-backend {operations}"
        return [statistics.mean(curve(flags, steps=200, seed=seed)[-50:]) for seed in (1, 2, 3)]

    plain, fast = ends("plain"), ends("compile")
    spread = max(plain) - min(plain)
    assert all(abs(a - b) < spread for a, b in zip(plain, fast, strict=True))
    assert abs(statistics.mean(plain) - statistics.mean(fast)) < spread / 2


if __name__ == "__main__":
    curves = {
        shape: [round(loss, 6) for loss in curve(f"{flags} --ops-backend plain")]
        for shape, flags in SHAPES.items()
    }
    CURVES.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
