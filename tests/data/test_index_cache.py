from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.data import index_cache
from megatron.data.index_cache import cached_arrays, file_fingerprint
from megatron.errors import InputError


def slow_build(log: Path) -> list[np.ndarray]:
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(0.3)
    return [np.arange(5), np.arange(3, dtype=np.uint16)]


def open_arrays(folder: Path, log: Path, key: int = 0) -> list[list[int]]:
    arrays = cached_arrays(str(folder), "label", {"key": key}, ("one", "two"), lambda: slow_build(log))
    return [values.tolist() for values in arrays]


def test_concurrent_processes_build_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.starmap(open_arrays, [(folder, log)] * 4, chunksize=1)
    assert results == [[[0, 1, 2, 3, 4], [0, 1, 2]]] * 4
    assert len(log.read_text().splitlines()) == 1
    assert not list(folder.glob("*.tmp"))
    open_arrays(folder, log, key=1)
    assert len(log.read_text().splitlines()) == 2


def test_waiting_for_the_lock_is_logged(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(index_cache, "LOG_WAIT_AFTER", 0.2)
    folder, log = tmp_path / "cache", tmp_path / "log"
    open_arrays(folder, log)
    for array in folder.glob("*.npy"):
        array.unlink()
    (lock,) = folder.glob("*.lock")
    with open(lock) as held, caplog.at_level(logging.INFO, "megatron"):
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.6, fcntl.flock, (held, fcntl.LOCK_UN)).start()
        open_arrays(folder, log)
    assert caplog.text.count("waiting for the process that holds") == 1
    assert str(lock) in caplog.text


def test_file_system_without_locks(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert open_arrays(tmp_path, tmp_path / "log") == [[0, 1, 2, 3, 4], [0, 1, 2]]


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written to .*file/cache: .*--data-cache-path"):
        open_arrays(tmp_path / "file" / "cache", tmp_path / "log")


def test_complete_cache_is_only_read(tmp_path: Path, monkeypatch) -> None:
    first = open_arrays(tmp_path, tmp_path / "log")
    monkeypatch.setattr(index_cache, "_lock", None)
    monkeypatch.setattr(os, "makedirs", None)
    assert open_arrays(tmp_path, tmp_path / "log") == first


@pytest.mark.parametrize("byte", [0, 130, 150, -1])
def test_damaged_file_is_rebuilt(tmp_path: Path, caplog, byte: int) -> None:
    """Any byte: of the header, of a value that stays plausible, of the checksum."""
    good = open_arrays(tmp_path, tmp_path / "log")
    path = sorted(tmp_path.glob("*-one.npy"))[0]
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)
    assert open_arrays(tmp_path, tmp_path / "log") == good
    assert f"{path} is damaged; rebuilding the index" in caplog.text
    assert len((tmp_path / "log").read_text().splitlines()) == 2
    assert np.load(path).tolist() == good[0], "any program can read the file"


@pytest.mark.parametrize("content", [b"\0", b"\x93NUMPY\x01\0v\0", b""], ids=["none", "magic", "whole"])
def test_a_file_with_a_hole_is_rebuilt(tmp_path: Path, content: bytes) -> None:
    """A sparse file of a terabyte, which starts like an array or with a whole one. Its checksum would take minutes."""
    good = open_arrays(tmp_path, tmp_path / "log")
    path = sorted(tmp_path.glob("*-one.npy"))[0]
    path.write_bytes(content or path.read_bytes())
    os.truncate(path, 10**12)
    assert open_arrays(tmp_path, tmp_path / "log") == good


def test_swapped_files_are_rebuilt(tmp_path: Path, caplog) -> None:
    """A whole file under the name of another one."""
    good = open_arrays(tmp_path, tmp_path / "log")
    one, two = sorted(tmp_path.glob("*.npy"))
    shutil.copyfile(two, one)
    assert open_arrays(tmp_path, tmp_path / "log") == good
    assert f"{one} is damaged; rebuilding the index" in caplog.text


def test_too_many_open_files(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(index_cache, "_lock", refuse)
    with pytest.raises(
        InputError, match=r"Too many open files; raise the limit of open files \(ulimit -n\)$"
    ):
        open_arrays(tmp_path, tmp_path / "log")


def test_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(bytes(3 << 20))
    first = file_fingerprint(str(file))
    assert file_fingerprint(str(file)) == first
    for content in (bytes((3 << 20) - 1), bytes((3 << 20) - 1) + b"1", b"1" + bytes((3 << 20) - 1)):
        status = file.stat()
        file.write_bytes(content)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert file_fingerprint(str(file)) != first
    file.write_bytes(bytes(3 << 20))
    os.utime(file, ns=(0, first["mtime_ns"] + 1))
    assert file_fingerprint(str(file)) != first
