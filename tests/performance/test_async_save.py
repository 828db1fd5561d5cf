"""Asynchronous saves write the same files as synchronous ones, one checkpoint at a time."""

from __future__ import annotations

import functools
import threading
from contextlib import nullcontext
from multiprocessing.pool import AsyncResult
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU, config_of
from torch._subclasses import FakeTensorMode

from megatron.arguments import parse_run_config
from megatron.checkpoint import save as save_module
from megatron.checkpoint import storage
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.pieces import PiecesToWrite, write_pieces
from megatron.checkpoint.save import Saver, Snapshot
from megatron.errors import InputError, TrainingFault
from megatron.parallel.mesh import Mesh, init_mesh
from megatron.performance.async_save import AsyncSaver, HostCopy
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.recipes.config import RetentionConfig
from megatron.recipes.retention import discard_older
from megatron.training.build import build_engine
from megatron.training.engine import Engine

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 59 --num-layers 2 --hidden-size 32 --num-attention-heads 4
    --seq-length 16 --micro-batch-size 2 --train-iters 20 --lr 2e-3 --device cpu --ddp-bucket-size 3000
"""
STRATEGY = "--data-parallel-sharding-strategy"


def make_engine(mesh: Mesh, flags: str = "") -> Engine:
    config = parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)
    engine = build_engine(config, GPT, mesh, vocab_size=60, padded_vocab_size=64)
    engine.buffer.initialize(1)
    return engine


def make_saver(root: Path | str, engine: Engine, log=print, **fields) -> AsyncSaver:
    return AsyncSaver(**vars(sync_saver(root, engine, log, **fields)))


def sync_saver(root: Path | str, engine: Engine, log=print, keep_last: int | None = None, **fields) -> Saver:
    config = CheckpointConfig(save=str(root), **fields)
    saver = Saver(config, engine.buffer, engine.optimizer, tokenizer_files={"vocab.json": b"{}"}, log=log)
    retention = RetentionConfig(keep_last=keep_last)
    saver.after_write.append(functools.partial(discard_older, config=retention))
    return saver


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
    """Take an optimizer step on random gradients."""
    engine.buffer.grads.copy_(torch.randn(engine.buffer.grads.shape, generator=torch.manual_seed(seed)))
    engine.optimizer.step(lr=1e-3, weight_decay=0.1)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def save_three(root: str, flags: str, in_background: bool) -> None:
    """Save checkpoints of three steps. With `in_background`, training continues during the writes."""
    config = parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)
    with init_mesh(config.parallel, CPU) as mesh:
        engine = make_engine(mesh, flags)
        if in_background:
            saver = make_saver(root, engine, keep_last=2)
        else:
            saver = sync_saver(root, engine, keep_last=2)
        with saver if in_background else nullcontext():
            for iteration in (1, 2, 3):
                step(engine, iteration)
                saver.save(state(iteration))
                if in_background:
                    saver.check()
            step(engine, 4)


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (1, ""),
        (1, "--bf16"),
        pytest.param(2, "--bf16 --tensor-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(2, "--use-distributed-optimizer --overlap-param-gather", marks=pytest.mark.slow),
        (2, f"{STRATEGY} optim_grads_params --bf16 --overlap-param-gather"),
        pytest.param(2, f"{STRATEGY} optim_grads --overlap-grad-reduce", marks=pytest.mark.slow),
    ],
)
def test_async_files_equal_sync_files(tmp_path: Path, processes: int, flags: str) -> None:
    for name in ("sync", "async"):
        (tmp_path / name).mkdir()
        run_distributed(save_three, processes, str(tmp_path / name), flags, name == "async", timeout=60)
    sync_files, async_files = (contents(tmp_path / name) for name in ("sync", "async"))
    assert sync_files == async_files
    assert sync_files[storage.TRACKER] == b"3"
    assert storage.iterations(tmp_path / "async") == [2, 3]
    assert find_checkpoint(str(tmp_path / "async"), None).iteration == 3


@pytest.mark.gpu
def test_async_files_equal_sync_files_from_a_gpu(tmp_path: Path) -> None:
    engine = make_engine(Mesh(device=torch.device("cuda")), "--bf16")
    for name in ("sync", "async"):
        (tmp_path / name).mkdir()
    sync_saver(tmp_path / "sync", engine).save(state(1))
    with make_saver(tmp_path / "async", engine) as saver:
        saver.save(state(1))
        step(engine, 2)
    assert contents(tmp_path / "sync") == contents(tmp_path / "async")


class BlockedDisk:
    """Blocks the writer before its first file of tensors until `opened` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()
        monkeypatch.setattr(save_module, "write_pieces", self.write_pieces)

    def write_pieces(self, path: Path, pieces: PiecesToWrite) -> AsyncResult[list[str]]:
        self.entered.set()
        assert self.opened.wait(60)
        return write_pieces(path, pieces)


def test_save_is_logged_once_complete(tmp_path: Path, monkeypatch) -> None:
    logged: list[str] = []
    disk, engine = BlockedDisk(monkeypatch), make_engine(Mesh(device=CPU))
    with make_saver(tmp_path, engine, logged.append) as saver:
        saver.save(state(1))
        assert disk.entered.wait(60)
        saver.check()
        assert logged == [] and storage.newest_iteration(tmp_path) is None
        disk.opened.set()
        saver.wait()
        assert logged == [f"saved checkpoint at iteration 1 to {tmp_path}"]
        saver.check()
    assert len(logged) == 1 and storage.newest_iteration(tmp_path) == 1


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_exit_waits_for_the_writer_unless_interrupted(tmp_path: Path, monkeypatch, error) -> None:
    disk, engine = BlockedDisk(monkeypatch), make_engine(Mesh(device=CPU))
    threading.Timer(0.5, disk.opened.set).start()
    try:
        with make_saver(tmp_path, engine) as saver:
            saver.save(state(1))
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        assert error is not None
    assert disk.opened.is_set() == (error is not KeyboardInterrupt)
    assert storage.newest_iteration(tmp_path) == (None if error is KeyboardInterrupt else 1)
    disk.opened.wait(60)
    if saver.writing is not None:
        saver.writing.join()


def test_next_save_waits_for_the_previous(tmp_path: Path, monkeypatch) -> None:
    disk, engine = BlockedDisk(monkeypatch), make_engine(Mesh(device=CPU))
    with make_saver(tmp_path, engine) as saver:
        saver.save(state(1))
        threading.Timer(0.3, disk.opened.set).start()
        saver.save(state(2))
        assert disk.opened.is_set() and storage.iterations(tmp_path)[0] == 1
    assert storage.iterations(tmp_path) == [1, 2]


def fail_on_one_rank(root: str) -> tuple[int, str]:
    """Fail to write iteration 2 on rank 1; return the iteration at which `check` raises, and the message."""
    config = parse_run_config(FLAGS.split(), description="", defaults=DEFAULTS)
    with init_mesh(config.parallel, CPU) as mesh:
        engine = make_engine(mesh)
        with make_saver(root, engine) as saver:
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


def test_failed_write_stops_all_ranks_at_the_same_iteration(tmp_path: Path) -> None:
    (first, other_message), (second, message) = run_distributed(fail_on_one_rank, 2, str(tmp_path))
    assert first == second
    assert message.startswith(f"--save: the checkpoint of iteration 2 cannot be written to {tmp_path}: ")
    assert message.endswith("No space left on device; earlier checkpoints are complete")
    assert "rank 1: [Errno 28] No space left on device" in other_message
    assert find_checkpoint(str(tmp_path), None).iteration == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", storage.TRACKER]


def check_before_rank_1_has_written(root: str) -> bool:
    """Return true if the save is still in progress once rank 0 has written, and wait until both have."""
    flags = "--tensor-model-parallel-size 2"  # ranks that are not replicas of each other
    config = parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)
    with init_mesh(config.parallel, CPU) as mesh:
        saver, written = make_saver(root, make_engine(mesh, flags)), threading.Event()
        saver.iteration, saver.writing = 1, threading.Thread(target=written.wait, args=(60,))
        saver.writing.start()
        if mesh.is_first:
            written.set()
            saver.writing.join()
        saver.check()
        first = saver.writing is not None
        written.set()
        while saver.writing is not None:
            saver.check()
        return first


def test_save_is_complete_once_every_rank_has_written(tmp_path: Path) -> None:
    assert run_distributed(check_before_rank_1_has_written, 2, str(tmp_path)) == [True, True]


def test_writer_error_is_logged_if_training_fails_too(tmp_path: Path, monkeypatch) -> None:
    """The error of training is raised, and that of the writer is logged."""
    logged: list[str] = []
    monkeypatch.setattr(save_module, "write_pieces", full_disk)
    with (
        pytest.raises(ValueError, match="training"),
        make_saver(tmp_path, make_engine(Mesh(device=CPU)), logged.append) as saver,
    ):
        saver.save(state(1))
        raise ValueError("training")
    assert len(logged) == 1 and "No space left" in logged[0]


def test_async_save_needs_a_folder() -> None:
    with pytest.raises(InputError, match="--async-save needs --save"):
        config_of("--async-save")


def test_host_memory_is_pinned_as_it_is(monkeypatch) -> None:
    """Not rounded up to a power of two, as torch's own pinned memory is, and released with its tensor."""
    pinned: dict[int, int] = {}

    class Runtime:
        @staticmethod
        def cudaHostRegister(pointer: int, size: int, flags: int) -> int:
            pinned[pointer] = size
            return flags

        @staticmethod
        def cudaHostUnregister(pointer: int) -> None:
            del pinned[pointer]

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    with FakeTensorMode():
        snapshot = Snapshot(
            {}, {"model": {"": [torch.ones(3, 7, device="cuda"), torch.ones(0, device="cuda")]}}
        )
    copy = HostCopy(snapshot, torch.device("cuda"))
    assert list(pinned.values()) == [3 * 7 * 4]
    del copy
    assert not pinned
