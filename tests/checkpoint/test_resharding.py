"""A checkpoint loads in any other layout, with bit-exact weights, master weights and optimizer states."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU
from safetensors import safe_open

from megatron.arguments import parse_run_config
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.load import load_into
from megatron.checkpoint.save import Saver
from megatron.parallel.mesh import init_mesh
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.tokenizer import padded_vocab_size
from megatron.training.build import build_engine

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 59 --num-layers 4 --hidden-size 32 --bf16
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu --seq-length 16
    --micro-batch-size 2 --train-iters 20 --lr 2e-3 --device cpu --ddp-bucket-size 3000
"""
TP, PP, ZERO = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--use-distributed-optimizer"
CHUNKS = "--num-layers-per-virtual-pipeline-stage"
LAYOUTS = {
    "one": (1, ""),
    "T2": (2, f"{TP} 2"),
    "T2+SP": (2, f"{TP} 2 --sequence-parallel"),
    "T4": (4, f"{TP} 4"),
    "P2": (2, f"{PP} 2"),
    "P4": (4, f"{PP} 4"),
    "P2V2": (2, f"{PP} 2 {CHUNKS} 1"),
    "D2": (2, ""),
    "D2+ZeRO": (2, ZERO),
    "D3+ZeRO": (3, ZERO),
    "T2D2+ZeRO": (4, f"{TP} 2 {ZERO}"),
    "T2P2": (4, f"{TP} 2 {PP} 2"),
    "P2D2V2+ZeRO": (4, f"{PP} 2 {CHUNKS} 1 {ZERO}"),
}


def load_and_save(load: str | None, save: str, flags: str) -> None:
    """Load a checkpoint in a layout and save it again. Without `load`, start from random weights and states."""
    config = parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)
    with init_mesh(config.parallel, CPU) as mesh:
        padded = padded_vocab_size(60, 8, mesh.tp.size)
        engine = build_engine(config, GPT, mesh, vocab_size=60, padded_vocab_size=padded)
        buffer, optimizer = engine.buffer, engine.optimizer
        if load is None:
            buffer.initialize(1)
            for owned in optimizer.state.values():
                for piece in owned:
                    piece.normal_()
            optimizer.steps = 7
        else:
            load_into(find_checkpoint(load, None, world=mesh.world), buffer, optimizer)
            assert optimizer.steps == 7
        state = {"task": "GPT", "iteration": 5, "consumed_samples": 10, "train_samples": 40, "bad_steps": 0}
        state |= {"evaluation_due": False, "history": [], "vocab_size": 60, "padded_vocab_size": padded}
        state |= {"schedule": {}, "config": {}}
        Saver(CheckpointConfig(save=save), buffer, optimizer, tokenizer_files={}, log=print).save(state)


def contents(root: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, assembled from its files as docs/checkpoints.md describes."""
    folder, whole = root / "iter_0000005", {}
    for kind, tensors in json.loads((folder / "index.json").read_text())["content"]["tensors"].items():
        for name, tensor in tensors.items():
            found = whole[f"{kind} {name}"] = torch.full(tensor["shape"], torch.nan)
            for file, key, (top, bottom), (left, right) in tensor["pieces"]:
                target = found.view(len(found), -1)[top:bottom, left:right]
                assert target.isnan().all(), f"{name} was saved twice"
                with safe_open(folder / file, framework="pt") as opened:
                    target.copy_(opened.get_tensor(key).view(target.shape))
            assert not found.isnan().any(), f"{name} is incomplete"
    return whole


# 4 layers of 12 parameters, 4 of them matrices, and 4 other parameters: weights, master weights, optimizer states.
TENSORS = {"adam": 4 * (4 * 12 + 4), "muon": 2 * (4 * 12 + 4) + 4 * 4 + 2 * (4 * 8 + 4)}


def assert_same(a: Path, b: Path, optimizer: str = "adam") -> None:
    first, second = contents(a), contents(b)
    assert first.keys() == second.keys() and len(first) == TENSORS[optimizer]
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def run(layout: str, load: Path | None, save: Path, optimizer: str = "adam") -> None:
    save.mkdir()
    processes, flags = LAYOUTS[layout]
    run_distributed(
        load_and_save, processes, load and str(load), str(save), f"{flags} --optimizer {optimizer}"
    )


@pytest.mark.parametrize(
    ("optimizer", "layouts"),
    [
        ("adam", ("one", "T4", "P2V2", "D3+ZeRO", "T2+SP", "P2D2V2+ZeRO", "one")),
        ("muon", ("one", "T2D2+ZeRO", "P2V2", "D3+ZeRO", "one")),
    ],
)
def test_chain_of_layouts(tmp_path: Path, optimizer: str, layouts: tuple[str, ...]) -> None:
    """A chain of loads and saves through layouts of each kind."""
    before = None
    for layout in layouts:
        folder = tmp_path / f"{layout}-after-{before.name if before else 'nothing'}"[:40]
        run(layout, before, folder, optimizer)
        if before is not None:
            assert_same(before, folder, optimizer)
        before = folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_pairs_of_layouts(tmp_path: Path) -> None:
    run("one", None, tmp_path / "start")
    for layout in LAYOUTS:
        run(layout, tmp_path / "start", tmp_path / layout)
        assert_same(tmp_path / "start", tmp_path / layout)
    for a, b in itertools.permutations(LAYOUTS, 2):
        run(b, tmp_path / a, tmp_path / f"{a} to {b}")
        assert_same(tmp_path / "start", tmp_path / f"{a} to {b}")
