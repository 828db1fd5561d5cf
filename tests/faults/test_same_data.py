"""Processes that read different data do not train."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from distributed import run_distributed
from models import CPU

from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.faults import same_data
from megatron.faults.same_data import check_same_data, fingerprint
from megatron.parallel.mesh import Axis, init_mesh

FLAGS = """
    --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1
    --tokenizer-type GPT2BPETokenizer
""".split()


def check_in(folder: str, names: list[str]) -> str | None:
    """Check on each rank a directory of its own, under the same relative paths."""
    os.chdir(f"{folder}/{os.environ['RANK']}")
    config = parse_run_config(
        [*FLAGS, "--data-path", *names, "--vocab-file", "vocab.json", "--merge-file", "merges.txt"],
        description="",
        defaults={},
    )
    with init_mesh(config.parallel, CPU) as mesh:
        try:
            check_same_data(config, mesh.world)
        except InputError as error:
            return str(error)
    return None


def write(folder: Path, changed: str | None) -> None:
    """Write the files of two ranks, the second with a change in one of them."""
    for rank in ("0", "1"):
        (folder / rank).mkdir(parents=True)
        for name in ("a.bin", "a.idx", "b.bin", "b.idx", "vocab.json", "merges.txt"):
            content = name.encode() * 1000
            other = rank == "1" and name == changed
            (folder / rank / name).write_bytes(content[:-1] + (b"!" if other else content[-1:]))


@pytest.mark.parametrize("changed", [None, "a.bin", "b.idx", "merges.txt"])
def test_a_stale_copy_is_named(tmp_path: Path, changed: str | None) -> None:
    write(tmp_path, changed)
    found = run_distributed(check_in, 2, str(tmp_path), ["0.3", "a", "0.7", "b"])
    assert found[0] == found[1]
    if changed is None:
        assert found[0] is None
    else:
        assert found[0].startswith(
            f"the processes do not read the same data: {changed} differ between machines;"
        )


def test_a_missing_file_differs(tmp_path: Path) -> None:
    write(tmp_path, None)
    (tmp_path / "1" / "a.idx").unlink()
    assert all("a.idx differ" in text for text in run_distributed(check_in, 2, str(tmp_path), ["a"]))


def test_fingerprints_of_large_files(tmp_path: Path) -> None:
    """They depend on the size and on the sampled blocks, both ends included, and take the same work for any size."""
    path = tmp_path / "x"

    def of(size: int, *changed: int) -> int:
        with path.open("wb") as file:
            file.truncate(size)
            for offset in changed:
                file.seek(offset)
                file.write(b"!")
        return fingerprint(str(path), 16)

    size = 10 * same_data.WHOLE_BYTES
    plain = of(size)
    assert of(size) == plain
    assert len({plain, of(size + 1), of(size - 1), of(size, 0), of(size, size - 1)}) == 5
    assert fingerprint(str(tmp_path / "missing"), 16) == 0


def test_only_files_share_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a blend and the borders of its phases name no files."""
    seen: dict[str, int] = {}
    monkeypatch.setattr(same_data, "fingerprint", seen.setdefault)
    monkeypatch.setattr(same_data, "all_reduce_max", lambda x, axis: x)
    words = "--data-path 0.3 a 0.7 b from=100 0.5 a 0.5 c --vocab-file v --merge-file m"
    config = parse_run_config([*FLAGS, *words.split()], description="", defaults={})
    check_same_data(config, Axis(0, 2, ranks=range(2)))
    names = [f"{prefix}.{suffix}" for prefix in "abc" for suffix in ("bin", "idx")]
    assert seen == dict.fromkeys([*names, "v", "m"], same_data.BLOCKS // 8)
