"""Recorded loss curves, and loss curves of compiled operations against plain ones.

`PYTHONPATH=. python tests/golden/test_golden.py` records the curves again. A change that needs this changes the
computation, and must say why.
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
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training.build import build_engine

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
    """Loss of every step, on sequences in which three of four tokens are determined by the token before."""
    config = parse_run_config([*FLAGS.split(), *flags.split()], description="", defaults=DEFAULTS)
    draw = torch.Generator().manual_seed(0)
    follows = torch.randperm(128, generator=draw)
    losses = []
    with init_mesh(config.parallel, choose_device("cpu")) as mesh:
        engine = build_engine(config, GPT, mesh, vocab_size=128, padded_vocab_size=128)
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
    """fp32 losses agree between machines up to rounding errors, which training amplifies."""
    golden = json.loads(CURVES.read_text(encoding="utf-8"))[shape]
    ours = curve(f"{SHAPES[shape]} --ops-backend {operations}")
    assert ours == pytest.approx(golden, rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["--bf16", ""])
def test_compiled_operations_train_as_well(shape: str, precision: str) -> None:
    """Losses of compiled and plain operations differ by less than those of different seeds."""

    def final_losses(operations: str) -> list[float]:
        flags = f"{SHAPES[shape]} {precision} --ops-backend {operations}"
        return [statistics.mean(curve(flags, steps=200, seed=seed)[-50:]) for seed in (1, 2, 3)]

    plain, fast = final_losses("plain"), final_losses("compile")
    spread = max(plain) - min(plain)
    assert all(abs(a - b) < spread for a, b in zip(plain, fast, strict=True))
    assert abs(statistics.mean(plain) - statistics.mean(fast)) < spread / 2


if __name__ == "__main__":
    curves = {
        shape: [round(loss, 6) for loss in curve(f"{flags} --ops-backend plain")]
        for shape, flags in SHAPES.items()
    }
    CURVES.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
