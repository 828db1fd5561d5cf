"""Durability: content is synced to disk before it is renamed to its final name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make, save
from nvidia import checkpoint_of

from megatron.checkpoint import storage
from megatron.commands.train_tokenizer import write_files
from megatron.data.index_cache import cached_arrays
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.interop.huggingface.write import write_folder
from megatron.interop.nvidia.write import write_megatron
from megatron.interop.tensor_writer import TensorToWrite
from megatron.recipes.best import keep_best
from megatron.recipes.roll_back import roll_back
from megatron.settings.rolled_back import ROLLED_BACK
from megatron.tokenizer.record import FOLDER, TokenizerRecord, write_tokenizer

MARK = 10**18  # modification time, in ns, of synced files; every later write changes it


class Disk:
    """Records fsync and rename, and fails if content is renamed before it is synced.

    Attributes:
        renamed: new names, in order.
        unsynced: folders with a rename that a power failure would undo.
        early: new names of renames that followed an unsynced rename.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.renamed: list[str] = []
        self.unsynced: set[int] = set()
        self.early: set[str] = set()
        fsync = os.fsync

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            os.utime(descriptor, ns=(MARK, MARK))
            self.unsynced.discard(os.fstat(descriptor).st_ino)

        monkeypatch.setattr(os, "fsync", synced)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._moving(getattr(os, name)))

    def _moving(self, move):
        def moved(source: str | os.PathLike, target: str | os.PathLike) -> None:
            source, target = Path(source), Path(target)
            late = [path for path in (source, *source.rglob("*")) if not on_disk(path)]
            assert not late, f"renamed to {target} before {late} was synced"
            if self.unsynced:
                self.early.add(target.name)
            move(source, target)
            self.renamed.append(target.name)
            self.unsynced.add(target.parent.stat().st_ino)

        return moved


def on_disk(path: Path) -> bool:
    return path.stat().st_mtime_ns == MARK


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    assert not disk.unsynced, "the last rename is not on disk"


def test_a_checkpoint(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process syncs the tensors that it writes; rank 0 cannot sync those of another machine."""
    sync_all, vocab = storage.sync_all, tmp_path / "vocab.json"
    vocab.write_text("{}")

    def after_tensors(folder: Path) -> None:
        assert all(map(on_disk, folder.glob("*.safetensors")))
        sync_all(folder)

    monkeypatch.setattr(storage, "sync_all", after_tensors)
    for _ in range(2):  # the second replaces the first
        save(tmp_path / "run", *make()[:2], iteration=1, files=[vocab])
    save(tmp_path / "run", *make()[:2], iteration=2)
    one, two, tracker = "iter_0000001", "iter_0000002", storage.TRACKER
    assert disk.renamed == [one, tracker, f".deleting-{one}", one, tracker, two, tracker]
    assert disk.early == {one}  # the old one is moved away for the new one; both are found by their number
    assert roll_back(tmp_path / "run", 1)
    assert disk.renamed[7:] == [tracker, f"abandoned-{two}-1", ROLLED_BACK]
    assert tracker not in disk.early


def test_the_best_checkpoint(disk: Disk, tmp_path: Path) -> None:
    save(tmp_path, *make()[:2], iteration=1)
    keep_best(tmp_path, 1)
    assert disk.renamed == ["iter_0000001", storage.TRACKER] * 2 and not disk.early


def test_a_dataset(disk: Disk, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document([np.arange(5)])
    assert disk.renamed == ["corpus.bin", "corpus.idx"]


def test_a_trained_tokenizer(disk: Disk, tmp_path: Path) -> None:
    """A lost tokenizer is trained again; a partial one must not be found."""
    write_files(tmp_path / "new", {"vocab.json": "{}", "merges.txt": "#version"})
    assert disk.renamed == ["vocab.json", "merges.txt"]
    disk.unsynced.clear()


def test_the_tokenizer_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is synced with all of its content."""
    fsync, sizes = os.fsync, {}

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        sizes[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fsync", synced)
    (tmp_path / "vocab.json").write_text("{}")
    record = TokenizerRecord(flags={}, type="x", vocab_size=1, eod=None, files={})
    write_tokenizer(f"{tmp_path}/corpus", record, {"vocab.json": tmp_path / "vocab.json"})()
    found = [path.stat() for path in (tmp_path / f"corpus{FOLDER}").iterdir()]
    assert len(found) == 2 and sizes == {status.st_ino: status.st_size for status in found}


def test_indices_of_samples(disk: Disk, tmp_path: Path) -> None:
    """A lost index is rebuilt; a partial one must not be found."""
    cached_arrays(str(tmp_path), "gpt", {}, ("a", "b"), lambda: [np.arange(5)] * 2)
    assert [name[-6:] for name in disk.renamed] == ["-a.npy", "-b.npy"]
    disk.unsynced.clear()


def test_converted_checkpoints(disk: Disk, tmp_path: Path) -> None:
    shards = [{name: TensorToWrite((2,), torch.float32, lambda: torch.ones(2))} for name in "ab"]
    write_folder(tmp_path / "hf", shards, {"config.json": b"{}"}, lambda size: None)
    write_megatron(
        checkpoint_of(tmp_path),
        tmp_path / "nvidia",
        lambda size: None,
        tensor_parallel=2,
        pipeline_parallel=2,
    )
    assert disk.renamed == ["hf", "release", storage.TRACKER] and not disk.early
