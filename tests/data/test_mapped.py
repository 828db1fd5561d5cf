"""Memory maps without file descriptors."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import build_gpt_datasets
from megatron.data.indexed import IndexedDataset
from megatron.data.mapped import map_file


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_a_map_lives_as_long_as_its_views(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    view = map_file(str(path))[16:].view(np.uint16)
    gc.collect()
    assert mapped(path)
    assert view[0] == 16 + 256 * 17 and not view.flags.writeable
    del view
    gc.collect()
    assert not mapped(path)


def test_files_that_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert map_file(str(tmp_path / "empty")).tolist() == []
    with pytest.raises(FileNotFoundError):
        map_file(str(tmp_path / "gone"))
    with pytest.raises(OSError):
        map_file(str(tmp_path))


def test_a_blend_holds_no_descriptors(write: Callable[..., IndexedDataset], tmp_path: Path) -> None:
    prefixes = [write([np.arange(30)] * 30, name=f"corpus{i}").prefix for i in range(40)]
    config = DataConfig(
        data_path=tuple(prefixes), split="8,1,1", seq_length=8, data_cache_path=str(tmp_path / "cache")
    )
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 8, hard))
    try:
        for _ in ("built", "from the cache"):
            datasets = build_gpt_datasets(config, samples=(400, 40, 40), seed=1, vocab_size=100)
            assert [len(datasets[name][0]["text"]) for name in ("train", "validation", "test")] == [9] * 3
            assert len(os.listdir("/proc/self/fd")) == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
