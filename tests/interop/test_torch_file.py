"""Files of torch.save: read as torch.load reads them; malicious and damaged files are refused."""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import pickle
import random
import struct
import tracemalloc
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.errors import InputError
from megatron.files import MAX_BYTES
from megatron.interop.torch_file import StoredTensor, read_torch_file
from megatron.interop.unpickle import Record

BOTH = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])


def values(whole: Any) -> Any:
    """Loaded data with tensors for stored tensors, and dicts of attributes for objects."""
    if isinstance(whole, dict):
        return {key: values(value) for key, value in whole.items()}
    if isinstance(whole, (list, tuple)):
        return type(whole)(map(values, whole))
    if isinstance(whole, Record):
        return values(whole.state)
    return whole.read() if isinstance(whole, StoredTensor) else whole


@BOTH
def test_equals_torch(tmp_path: Path, zipped: bool) -> None:
    table = torch.arange(60.0).view(12, 5)
    whole = {
        "tensors": [table, table[3:7, 1:], table.t(), torch.tensor(7), torch.empty(0, 3), table.long()],
        "more": (table.bfloat16(), table > 3, torch.nn.Parameter(table.half())),
        "ordered": collections.OrderedDict(a=1, b=collections.OrderedDict()),
        3: [None, True, False, -1, 2**40, 2**80, 0.5, "text", "é" * 300, b"bytes", (), [], {}],
        "args": argparse.Namespace(dtype=torch.bfloat16, lr=1e-3, path=["a", "b"]),
        "simple": types.SimpleNamespace(x=1),
        "scalars": [np.float64(0.25), np.int32(-3), np.bool_(True)],
        "shape": torch.Size([2, 3]),
    }
    path = tmp_path / "x.pt"
    torch.save(whole, path, _use_new_zipfile_serialization=zipped)
    found = values(read_torch_file(path))
    for ours, theirs in zip(
        (*found["tensors"], *found["more"]), (*whole["tensors"], *whole["more"]), strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert found["args"] == vars(whole["args"])
    assert found["simple"] == {"x": 1}
    assert found["shape"] == (2, 3)
    for same in ("ordered", 3, "scalars"):
        assert found[same] == whole[same]


@BOTH
def test_rng_states(tmp_path: Path, zipped: bool) -> None:
    """Files may hold RNG states of Python, NumPy and torch."""
    states = {"a": random.getstate(), "b": np.random.RandomState(1).get_state(), "c": torch.get_rng_state()}
    torch.save(states, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    found = read_torch_file(tmp_path / "x.pt")
    assert found["a"] == random.getstate()
    assert torch.equal(found["c"].read(), states["c"])


@BOTH
def test_file_inside_a_file(tmp_path: Path, zipped: bool) -> None:
    torch.save(torch.arange(9), tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    content = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "two").write_bytes(b"before" + content + b"after")
    found = read_torch_file(tmp_path / "two", 6, len(content))
    assert torch.equal(found.read(), torch.arange(9))
    for torn in (0, 5, len(content) // 2, len(content) - 1):
        with pytest.raises(InputError, match="two"):
            read_torch_file(tmp_path / "two", 6, torn)


@BOTH
def test_memory_of_reading_a_row(tmp_path: Path, zipped: bool) -> None:
    """Only the requested rows are read: here one of sixteen rows of 1 MB."""
    torch.save(
        torch.arange(2**22).view(16, -1).int(), tmp_path / "x.pt", _use_new_zipfile_serialization=zipped
    )
    tracemalloc.start()
    found = read_torch_file(tmp_path / "x.pt", 0, (tmp_path / "x.pt").stat().st_size)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()
    assert torch.equal(found.row(3).read(), torch.arange(3 * 2**18, 4 * 2**18).int())


class Call:
    """Pickles as a call of a function with arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple:
        return self.call


class WithState:
    """Pickles as a call whose result is given a state."""

    def __init__(self, function: Any, args: tuple, state: Any) -> None:
        self.parts = function, args, state

    def __reduce__(self) -> tuple:
        return self.parts


def malicious_objects(marker: Path) -> dict[str, Any]:
    import os

    command = f"touch {marker}"
    return {
        "os.system": Call(os.system, command),
        "eval": Call(eval, f"open({str(marker)!r}, 'w')"),
        "exec in a list in a dict": {"model": [Call(exec, f"open({str(marker)!r}, 'w')")]},
        "getattr of getattr": Call(getattr, Call(getattr, 1, "real"), "imag"),
        "open": Call(open, str(marker), "w"),
        "a class of this file": WithState(Call, (), {"x": 1}),
        "attributes with a call": WithState(types.SimpleNamespace, (), Call(os.system, command)),
        "bytes in another encoding": Call(__import__("_codecs").encode, "x", "rot13"),
        "a function of torch": Call(torch.load, str(marker)),
    }


@BOTH
@pytest.mark.parametrize("name", list(malicious_objects(Path())))
def test_no_code_is_executed(tmp_path: Path, name: str, zipped: bool) -> None:
    marker = tmp_path / "marker"
    thing = malicious_objects(marker)[name]
    torch.save({"model": thing}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match=r"x\.pt: (holds|is damaged)"):
        read_torch_file(tmp_path / "x.pt")
    assert not marker.exists()


def zip_of(path: Path, program: bytes, **entries: bytes) -> Path:
    """Zip file in the format of torch.save, with the given pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", program)
        for name, content in entries.items():
            archive.writestr(f"x/data/{name}", content)
    return path


STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0%bX\x03\0\0\0cpuK%ctQ"


# A list that holds the same list twice, nested forty times: its repr is exponentially long.
DOUBLED = b"(" * 40 + b"]" + b"q\0h\0l" * 40


def tensor(
    elements: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], key: bytes = b"0"
) -> bytes:
    """Pickle of a tensor whose storage has `elements` elements."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + n.to_bytes(8, "little") for n in values) + b"t"

    storage = STORAGE % (key, bytes([elements]))
    location = b"K" + bytes([offset]) + numbers(shape) + numbers(stride)
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + location + b"\x89}tR."


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (tensor(200, 0, (4,), (1,)), "has the wrong length"),
        (tensor(4, 1, (4,), (1,)), "reaches beyond"),
        (tensor(4, 0, (2, 2), (3, 1)), "reaches beyond"),
        (tensor(4, 0, (2**50,), (0,)), "reaches beyond"),
        (tensor(4, 0, (2**52, 2**52), (0, 0)), "reaches beyond"),
        (tensor(4, 0, (1,) * 50, (1,) * 50), "is not one of torch.save"),
        (tensor(4, 0, (2,), (1, 1)), "is not one of torch.save"),
        (tensor(4, 0, (2,), (1,), b"7"), "data/7"),
        (b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b"s.", "damaged"),
        (b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s.", "key that is a tuple"),
        (b"\x80\x02}(]K\x01u.", "key that is a list"),
        (b"\x80\x02c_codecs\nencode\nX\x01\0\0\0x" + DOUBLED + b"\x86R.", "the encoding of type list"),
        (
            b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0%bN" % b"0" + DOUBLED + b"tQ.",
            "of type list",
        ),
        (b"\x80\x02]r\xff\xff\xff\xff0.", "the opcode POP"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "damaged"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.", "damaged"),
        (b"\x80\x02R.", "the stack is empty"),
        (b"\x80\x02t.", "damaged"),
        (b"\x80\x02K\x01K\x02", "exhausted"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"\x80\x02\x82\x01.", "the opcode EXT1"),
        (b"\x80\x02(cos\nsystem\nX\x04\0\0\0exito.", "os.system"),
        (b"\x80\x02(X\x04\0\0\0exitios\nsystem\n.", "the opcode INST"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04exit\x85R.", "os.system"),
        (b"\x80\x02K\x01)R.", "a call of an object that is not a function"),
        (b"\xff\xfe", "damaged"),
        (b"", "damaged"),
    ],
)
def test_malicious_pickles(tmp_path: Path, program: bytes, message: str) -> None:
    path = zip_of(tmp_path / "x.pt", program, **{"0": bytes(16)})
    with pytest.raises(InputError, match=message) as caught:
        read_torch_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", ["bytes", "shapes", "names"])
def test_a_small_pickle_takes_little_memory(tmp_path: Path, kind: str) -> None:
    """Calls on one remembered object would make copies of it without end."""
    text = b"X" + (10**6).to_bytes(4, "little") + b"x" * 10**6
    copies = "is damaged .it makes more bytes than it has"
    program, message = {
        "bytes": (
            b"\x80\x02c_codecs\nencode\nq\0" + text + b"X\6\0\0\0latin1\x86q\1" + b"h\0h\1R" * 300,
            copies,
        ),
        "shapes": (b"\x80\x02ctorch\nSize\nq\0](" + b"N" * 10**5 + b"e\x85q\1" + b"h\0h\1R" * 300, copies),
        "names": (
            b"\x80\x02" + text + b"q\0X\x08\0\0\0megatronq\1" + b"h\1h\0\x93" * 300,
            "holds megatron.xxx",
        ),
    }[kind]
    path = zip_of(tmp_path / "x.pt", program + b".")
    tracemalloc.start()
    with pytest.raises(InputError, match=message):
        read_torch_file(path)
    assert tracemalloc.get_traced_memory()[1] < 30 * 10**6
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["text", "line", "directory"])
def test_files_with_a_hole(tmp_path: Path, kind: str) -> None:
    """A file that takes no space on the disk can state any length."""
    path = tmp_path / "x.pt"
    beginnings = {"text": b"\x80\x02\x8d" + (1 << 32).to_bytes(8, "little"), "line": b"\x80\x02c"}
    path.write_bytes(beginnings.get(kind, b"PK\3\4"))
    os.truncate(path, 1 << 33)
    if kind == "directory":
        with path.open("ab") as file:
            file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 1 << 31, 1 << 31, 0))
    tracemalloc.start()
    with pytest.raises(InputError, match="is damaged"):
        read_torch_file(path)
    assert tracemalloc.get_traced_memory()[1] < 2 * MAX_BYTES + 10**6
    tracemalloc.stop()


def test_unknown_enums(tmp_path: Path) -> None:
    """The flags of a run hold enums, whose classes need not be importable."""
    program = b"\x80\x02cmegatron.enums\nModelType\nK\x01\x85R."
    found = read_torch_file(zip_of(tmp_path / "x.pt", program))
    assert (found.kind, found.args, found.get("name")) == ("megatron.enums.ModelType", (1,), None)


def test_deep_nesting(tmp_path: Path) -> None:
    """Deep nesting is harmless as long as nothing recurses into it."""
    path = zip_of(tmp_path / "x.pt", b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".")
    assert len(read_torch_file(path)) == 1


def test_other_zip_files(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("release/mp_rank_00/model_optim_rng.pt", b"")
    with pytest.raises(InputError, match="unzip it"):
        read_torch_file(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../x/data.pkl", b"\x80\x02N.")
        archive.writestr("/data.pkl", b"\x80\x02N.")
    assert read_torch_file(path) is None
    assert [file.name for file in tmp_path.iterdir()] == ["x.pt"]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(10**7))
    with pytest.raises(InputError, match="compressed"):
        read_torch_file(path)


@BOTH
def test_truncated_files(tmp_path: Path, zipped: bool) -> None:
    """Truncation at any length gives an error."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(99.0), "b": [1, "x"]}, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    for length in (*range(0, 600, 7), len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"x\.pt"):
            read_torch_file(path)


@BOTH
def test_flipped_bytes_raise_only_input_errors(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(9.0), "b": [1, "x"]}, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    rng = random.Random(1)
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(InputError):
            values(read_torch_file(path))


def test_missing_and_other_files(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match="is missing, or not a file"):
            read_torch_file(path)
    (tmp_path / "x").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(InputError, match=r"not a file of torch\.save"):
        read_torch_file(tmp_path / "x")
    (tmp_path / "x").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    with pytest.raises(InputError, match=r"not one of torch\.save"):
        read_torch_file(tmp_path / "x")


def test_equals_torch_on_nvidia_files(shared: Path) -> None:
    found = sorted(shared.glob("vectors/*/*/*/*/model_optim_rng.pt"))
    assert found
    for path in found:
        theirs = torch.load(path, weights_only=False)
        ours = read_torch_file(path)
        assert list(ours) == list(theirs)
        assert ours["args"].state == vars(theirs["args"])
        assert_same(ours["model"], theirs["model"])
        assert_same(ours.get("optimizer"), theirs.get("optimizer"))


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(ours.read(), theirs)
    else:
        assert ours == theirs
