"""Saving in the background: the same files, of the state at the time of saving, one checkpoint after the other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU

from megatron.arguments import parse_run_config
from megatron.checkpoint import save as save_module
from megatron.checkpoint import storage
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.saver import Saver
from megatron.errors import InputError, TrainingFault
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.training.engine import Engine
from pretrain_gpt import DEFAULTS, GPT

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 59 --num-layers 2 --hidden-size 32 --num-attention-heads 4
    --seq-length 16 --micro-batch-size 2 --train-iters 20 --lr 2e-3 --device cpu --ddp-bucket-size 3000
"""


def make_engine(mesh: Mesh, flags: str = "") -> Engine:
    config = parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)
    engine = Engine(config, GPT, mesh, vocab_size=60, padded_vocab_size=64)
    engine.buffer.initialize(1)
    return engine


def make_saver(root: Path | str, engine: Engine, log=print, **fields) -> Saver:
    config = CheckpointConfig(save=str(root), **fields)
    files = {"vocab.json": b"{}"}
    return Saver(config, engine.buffer, engine.optimizer, tokenizer_files=files, log=log)


def state(iteration: int) -> dict:
    return {
        "task": "GPT",
        "iteration": iteration,
        "consumed_samples": 0,
        "train_samples": 40,
        "evaluation_due": False,
        "bad_steps": 0,
        "history": [],
        "vocab_size": 60,
        "padded_vocab_size": 64,
        "schedule": {},
        "config": {},
    }


def step(engine: Engine, seed: int) -> None:
    """A step of the optimizer, on gradients of no meaning."""
    engine.buffer.grads.copy_(torch.randn(engine.buffer.grads.shape, generator=torch.manual_seed(seed)))
    engine.optimizer.step(lr=1e-3, weight_decay=0.1)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def save_three(root: str, flags: str, in_background: bool) -> None:
    """Checkpoints of three steps; in the background, training goes on behind the writer's back."""
    config = parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)
    with init_mesh(config.parallel, CPU) as mesh:
        engine = make_engine(mesh, flags)
        with make_saver(root, engine, async_save=in_background, keep_last=2) as saver:
            for iteration in (1, 2, 3):
                step(engine, iteration)
                saver.save(state(iteration))
                saver.check()
            step(engine, 4)


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (1, ""),
        (1, "--bf16"),
        (2, "--bf16 --tensor-model-parallel-size 2"),
        (2, "--use-distributed-optimizer --overlap-param-gather"),
    ],
)
def test_the_files_are_the_same(tmp_path: Path, processes: int, flags: str) -> None:
    for name in ("waiting", "going-on"):
        (tmp_path / name).mkdir()
        run_distributed(save_three, processes, str(tmp_path / name), flags, name == "going-on", timeout=60)
    waiting, going_on = (contents(tmp_path / name) for name in ("waiting", "going-on"))
    assert waiting == going_on
    assert waiting[storage.TRACKER] == b"3"
    assert storage.iterations(tmp_path / "going-on") == [2, 3]
    assert find_checkpoint(str(tmp_path / "going-on"), None, verify=True).iteration == 3


@pytest.mark.gpu
def test_the_files_are_the_same_from_a_gpu(tmp_path: Path) -> None:
    engine = make_engine(Mesh(device=torch.device("cuda")), "--bf16")
    for name, in_background in (("waiting", False), ("going-on", True)):
        (tmp_path / name).mkdir()
        with make_saver(tmp_path / name, engine, async_save=in_background) as saver:
            saver.save(state(1))
            if in_background:
                step(engine, 2)
    assert contents(tmp_path / "waiting") == contents(tmp_path / "going-on")


class Gate:
    """Holds the writer up, at the disk, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()
        monkeypatch.setattr(save_module, "sync", self.wait)

    def wait(self, _: Path) -> None:
        self.entered.set()
        assert self.opened.wait(60)


def test_it_is_said_to_be_saved_when_it_is(tmp_path: Path, monkeypatch) -> None:
    said: list[str] = []
    gate, engine = Gate(monkeypatch), make_engine(Mesh(device=CPU))
    with make_saver(tmp_path, engine, said.append, async_save=True) as saver:
        saver.save(state(1))
        assert gate.entered.wait(60)
        saver.check()
        assert said == [] and storage.newest_iteration(tmp_path) is None
        gate.opened.set()
        saver.wait()
        assert said == [f"saved checkpoint at iteration 1 to {tmp_path}"]
        saver.check()
    assert len(said) == 1 and storage.newest_iteration(tmp_path) == 1


@pytest.mark.parametrize("leave", [None, ValueError, KeyboardInterrupt])
def test_leaving_waits_unless_it_must_be_quick(tmp_path: Path, monkeypatch, leave) -> None:
    gate, engine = Gate(monkeypatch), make_engine(Mesh(device=CPU))
    threading.Timer(0.5, gate.opened.set).start()
    try:
        with make_saver(tmp_path, engine, async_save=True) as saver:
            saver.save(state(1))
            if leave is not None:
                raise leave
    except (ValueError, KeyboardInterrupt):
        assert leave is not None
    assert gate.opened.is_set() == (leave is not KeyboardInterrupt)
    assert storage.newest_iteration(tmp_path) == (None if leave is KeyboardInterrupt else 1)
    gate.opened.wait(60)
    if saver.writing is not None:
        saver.writing.join()


def test_the_next_save_waits_for_the_last(tmp_path: Path, monkeypatch) -> None:
    gate, engine = Gate(monkeypatch), make_engine(Mesh(device=CPU))
    with make_saver(tmp_path, engine, async_save=True) as saver:
        saver.save(state(1))
        threading.Timer(0.3, gate.opened.set).start()
        saver.save(state(2))
        assert gate.opened.is_set() and storage.iterations(tmp_path)[0] == 1
    assert storage.iterations(tmp_path) == [1, 2]


def fail_on_one_rank(root: str) -> tuple[int, str]:
    """The iteration at which the run learns that a rank could not write the checkpoint of iteration 2, and how."""
    config = parse_run_config(FLAGS.split(), description="", defaults=DEFAULTS)
    with init_mesh(config.parallel, CPU) as mesh:
        engine = make_engine(mesh)
        with make_saver(root, engine, async_save=True) as saver:
            saver.save(state(1))
            saver.wait()
            if mesh.world.rank == 1:
                save_module.write_pieces = full_disk
            saver.save(state(2))
            for iteration in range(3, 100000):
                step(engine, iteration)
                try:
                    saver.check()
                except TrainingFault as fault:
                    return iteration, str(fault)
    raise AssertionError


def full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_failure_stops_all_ranks_at_once(tmp_path: Path) -> None:
    (first, other_says), (second, says) = run_distributed(fail_on_one_rank, 2, str(tmp_path))
    assert first == second
    assert says.startswith(f"--save: the checkpoint of iteration 2 cannot be written to {tmp_path}: ")
    assert says.endswith("No space left on device; earlier checkpoints are complete")
    assert "rank 1 failed; see its message" in other_says
    assert find_checkpoint(str(tmp_path), None, verify=True).iteration == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", storage.TRACKER]


def test_what_else_went_wrong_is_not_lost(tmp_path: Path, monkeypatch) -> None:
    """Of two faults the one that ended training is raised, and that of the writer is said."""
    said: list[str] = []
    monkeypatch.setattr(save_module, "write_pieces", full_disk)
    with (
        pytest.raises(ValueError, match="training"),
        make_saver(tmp_path, make_engine(Mesh(device=CPU)), said.append, async_save=True) as saver,
    ):
        saver.save(state(1))
        raise ValueError("training")
    assert len(said) == 1 and "No space left" in said[0]


def test_it_needs_a_folder() -> None:
    with pytest.raises(InputError, match="--async-save needs --save"):
        CheckpointConfig(async_save=True)
