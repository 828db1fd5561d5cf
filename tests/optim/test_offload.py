"""Optimizer state in host memory: the same bits as without it, and its bytes by formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from gpu_path.recorded_step import train
from models import CPU, config_of

from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.load import load_into
from megatron.checkpoint.save import Saver
from megatron.errors import InputError
from megatron.optim import offload
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.planner.dry_run import DryRun, longest_batch
from megatron.pretrain_gpt import GPT
from megatron.recipes.freeze import Frozen
from megatron.training.build import build_engine
from megatron.training.engine import Engine

OFFLOAD = "--cpu-offload-optimizer"
MIXTURE = """
    --num-experts 4 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --disable-bias-linear --bf16
"""


def state_of(engine: Engine) -> list[torch.Tensor]:
    """Parameters, master weights and optimizer state."""
    state = [x for pieces in engine.optimizer.state.values() for x in pieces]
    return [engine.buffer.params, *engine.buffer.masters, *state]


def trained(mesh: Mesh, flags: str, *, steps: int = 3, fault: int | None = None) -> Engine:
    """An engine after some steps, in which the gradient of step `fault` is infinite."""
    config = config_of(flags)
    # Without rows that pad the vocabulary, which a checkpoint leaves out.
    engine = build_engine(config, GPT, mesh, vocab_size=60, padded_vocab_size=60)
    engine.buffer.initialize(1)
    batch = longest_batch(config, GPT, 60)
    for step in range(steps):
        if step == fault:
            engine.optimizer.grads[-1][0] = torch.inf
        train(engine, batch, 1, step)
    return engine


def is_same(a: Engine, b: Engine) -> bool:
    return all(torch.equal(x, y) for x, y in zip(state_of(a), state_of(b), strict=True))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16",
        "--fp16 --initial-loss-scale 1024",
        "--bf16 --bf16-optimizer-states",
        "--bf16 --optimizer lion",
        "--optimizer sgd --clip-grad 0",
        MIXTURE,
    ],
)
def test_same_bits_in_pieces(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    """Also where a step is skipped."""
    monkeypatch.setattr(offload, "PIECE_SIZE", 1024)
    flags += " --on-non-finite skip"
    engines = [trained(Mesh(device=CPU), f"{flags} {more}", fault=1) for more in ("", OFFLOAD)]
    optimizers = {bucket.group.optimizer for bucket in engines[1].buffer.buckets}
    (offloaded,) = (o for o in optimizers if isinstance(o, offload.Offloaded))
    assert offloaded.num_pieces > 10 * offload.NUM_SLOTS
    assert engines[1].optimizer.steps == 2
    assert is_same(*engines)


def save(engine: Engine, folder: Path) -> Path:
    """Save a checkpoint; returns its folder."""
    folder.mkdir(exist_ok=True)
    state = {
        "task": "GPT",
        "iteration": 3,
        "consumed_samples": 0,
        "train_samples": 40,
        "evaluation_due": False,
    }
    state |= {
        "bad_steps": 0,
        "history": [],
        "vocab_size": 60,
        "padded_vocab_size": 60,
        "schedule": {},
        "config": {},
    }
    Saver(CheckpointConfig(save=str(folder)), engine.buffer, engine.optimizer, {}, log=print).save(state)
    return folder / "iter_0000003"


def loaded(mesh: Mesh, flags: str, folder: Path) -> Engine:
    """An engine that takes one more step after the checkpoint in a folder."""
    engine = trained(mesh, flags, steps=1)
    load_into(find_checkpoint(str(folder), None, world=mesh.world), engine.buffer, engine.optimizer)
    engine.buffer.sync_params()
    train(engine, longest_batch(engine.config, GPT, 60), 1, 3)
    return engine


def compare(flags: str, folder: str) -> tuple[bool, bool, list[bool]]:
    """Compare weights and state, the bytes of checkpoints, and runs that resume from the other's checkpoint."""
    offload.PIECE_SIZE, root = 1024, Path(folder)
    kinds = {"here": flags, "offloaded": f"{flags} {OFFLOAD}"}
    with init_mesh(config_of(flags).parallel, CPU) as mesh:
        engines = {name: trained(mesh, given) for name, given in kinds.items()}
        saved = [save(engine, root / name) for name, engine in engines.items()]
        names = [[path.name for path in sorted(of.glob("*.safetensors"))] for of in saved]
        same_files = names[0] == names[1] and all(
            (saved[0] / name).read_bytes() == (saved[1] / name).read_bytes() for name in names[0]
        )
        further = trained(mesh, flags, steps=4)
        resumed = [
            loaded(mesh, kinds[kind], root / of)
            for kind, of in (("here", "offloaded"), ("offloaded", "here"), ("offloaded", "offloaded"))
        ]
        return is_same(*engines.values()), same_files, [is_same(engine, further) for engine in resumed]


STRATEGY = "--data-parallel-sharding-strategy"


def test_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "PIECE_SIZE", 1024)
    assert compare("--bf16", str(tmp_path)) == (True, True, [True] * 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        f"--bf16 {STRATEGY} optim_grads_params --overlap-param-gather --overlap-grad-reduce",
        *(
            f"{precision} {STRATEGY} {strategy} --ddp-bucket-size 3000"
            for precision in ("", "--bf16", "--fp16")
            for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")
        ),
        f"--bf16 --tensor-model-parallel-size 2 {STRATEGY} optim",
        f"{MIXTURE} --expert-model-parallel-size 2",
    ],
)
def test_two_ranks(tmp_path: Path, flags: str) -> None:
    found = run_distributed(compare, 2, f"{flags} --global-batch-size 4", str(tmp_path))
    assert found == [(True, True, [True] * 3)] * 2


def test_bytes_by_formula() -> None:
    """State that leaves the device, and that each step copies."""
    flags = "--bf16 --hidden-size 256 --seq-length 32 --device cuda"
    here, offloaded = (
        DryRun.from_config(config_of(f"{flags} {more}"), GPT, 1).count(0) for more in ("", OFFLOAD)
    )
    state = here.memory["master weights"] + here.memory["moments"]
    assert offloaded.memory["master weights"] == offloaded.memory["moments"] == 0
    assert offloaded.memory["in host memory"] == state
    assert offloaded.traffic["copy", "to device"].bytes == offloaded.traffic["copy", "to host"].bytes == state
    # One bucket has all matrices: four layers of 12 h^2, the table of 128 rows and 32 positions.
    matrices = 4 * 12 * 256**2 + (128 + 32) * 256
    slots = offload.NUM_SLOTS * 12 * min(offload.PIECE_SIZE, matrices)
    assert offloaded.memory["buffers"] == here.memory["buffers"] + slots
    assert offloaded.memory["peak"] == here.memory["peak"] - state + slots


def test_needs_an_optimizer_of_elements() -> None:
    with pytest.raises(InputError, match="--optimizer muon needs whole matrices"):
        config_of(f"{OFFLOAD} --optimizer muon")


def test_an_optimizer_with_its_own_division_is_refused() -> None:
    with pytest.raises(InputError, match="Frozen has a `prepare` of its own"):
        offload.Offloaded(Frozen(config_of("")))
