"""Full and read-only disks: errors take one line, checkpoints stay complete, and a run resumes once there is space."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvidia import checkpoint_of

from megatron.checkpoint import storage
from megatron.checkpoint.checkpoint import open_checkpoint
from megatron.errors import InputError, TrainingFault
from megatron.interop.nvidia.write import write_megatron

# A checkpoint takes 1.5 MB, all but 20 kB of it in tensors.
FLAGS = """
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0 --lr 1e-2
    --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --train-iters 12
    --eval-iters 0 --save-interval 2
""".split()
MODES = pytest.mark.parametrize("mode", [[], ["--async-save"]], ids=["sync", "async"])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 5 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk to fill")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def assert_complete(root: Path, iterations: list[int]) -> None:
    assert storage.iterations(root) == iterations
    assert storage.newest_iteration(root) == iterations[-1]
    for iteration in iterations:
        manifest = open_checkpoint(storage.folder_of(root, iteration)).manifest
        manifest.verify(list(manifest.files))


@pytest.mark.parametrize("mode", [pytest.param([], marks=pytest.mark.slow), ["--async-save"]])
def test_missing_space_is_detected_before_writing(command, pretrain, disk: Path, mode: list[str]) -> None:
    flags = [*FLAGS, *mode, "--save", disk / "run", "--load", disk / "run"]
    result = command("pretrain_gpt.py", *flags, status=1)
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(
        f"error: --save: the checkpoint of iteration 8 cannot be written to {disk}/run: "
    )
    assert " are free; earlier checkpoints are complete" in result.stderr
    assert_complete(disk / "run", [2, 4, 6])
    shutil.rmtree(disk / "run" / "iter_0000002")
    assert "iterations 7 to 12" in pretrain(*flags, "--keep-last", 1)
    assert_complete(disk / "run", [12])


@MODES
def test_disk_fills_during_a_save(pretrain, disk: Path, mode: list[str], monkeypatch) -> None:
    flags = [*FLAGS, *mode, "--save", disk / "run", "--load", disk / "run"]
    plenty = shutil.disk_usage(disk)._replace(free=10**9)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: plenty)
        with pytest.raises(
            TrainingFault, match=r"No space left on device.*; earlier checkpoints are complete"
        ):
            pretrain(*flags)
    assert_complete(disk / "run", [2, 4, 6])
    assert not list((disk / "run").glob(".writing-iter*"))
    # Space for the tensors but not for their index.
    shutil.rmtree(disk / "run" / "iter_0000002")
    free = shutil.disk_usage(disk).free
    size = sum(p.stat().st_size for p in (disk / "run" / "iter_0000006").glob("*.safetensors"))
    (disk / "other").write_bytes(bytes(free - size - 3 * 4096))
    with pytest.raises(TrainingFault, match=r"iteration 8 .*No space left on device.*"):
        pretrain(*flags)
    assert_complete(disk / "run", [4, 6])
    (disk / "other").unlink()
    pretrain(*flags, "--keep-last", 1)
    assert_complete(disk / "run", [12])


def test_read_only_disk(pretrain, disk: Path) -> None:
    flags = [*FLAGS, "--save", disk / "run", "--load", disk / "run"]
    pretrain(*flags, "--exit-interval", 2)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(InputError, match=f"--save: {disk}/run cannot be written to"):
        pretrain(*flags)
    assert_complete(disk / "run", [2])


def test_full_disk_during_megatron_export(disk: Path, tmp_path: Path, monkeypatch) -> None:
    """An export checks the free space first; if the disk fills nevertheless, no files are left."""
    checkpoint, root = checkpoint_of(tmp_path, ffn_hidden_size=2500, num_layers=2), disk / "x"
    sizes = {"tensor_parallel": 2, "pipeline_parallel": 2}
    write_megatron(checkpoint, tmp_path / "x", lambda size: None, **sizes)
    needed = sum(path.stat().st_size for path in (tmp_path / "x").rglob("*.pt"))
    (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - needed // 2))
    with pytest.raises(OSError, match=r"it needs (\S+) GB, and \S+ GB are free") as caught:
        write_megatron(checkpoint, root, lambda size: None, **sizes)
    assert float(str(caught.value).split()[2]) * 1e9 == pytest.approx(needed, rel=0.05)
    plenty = shutil.disk_usage(disk)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: plenty)
    with pytest.raises(OSError, match="No space left on device"):
        write_megatron(checkpoint, root, lambda size: None, **sizes)
    assert not root.exists()


def test_two_runs_cannot_save_to_one_folder(pretrain, tmp_path: Path) -> None:
    owner = rf"is being written to by another run \(process {os.getpid()} on "
    with storage.lock(tmp_path), pytest.raises(InputError, match=owner):
        pretrain(*FLAGS, "--save", tmp_path)
    assert not storage.iterations(tmp_path)
