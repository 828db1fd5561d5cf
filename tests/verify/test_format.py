"""Captures on disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from megatron.errors import InputError
from megatron.verify.format import Capture, CaptureWriter, Place, Record


def write(folder: Path, **settings: object) -> None:
    writer = CaptureWriter(
        folder, run={"precision": "fp32"}, sizes={"tp": 2}, coordinates={"tp": 0}, **settings
    )
    place = Place(shape=(4, 3), dim=0, ranges=((0, 2),), local_shape=(2, 3), valid=3, flat=(0, 6))
    writer.add(Record(kind="gradient", name="w", step=1, place=place, sum_over=("dp",)), torch.arange(6.0))
    writer.add(Record(kind="loss", name="lm loss", step=1, sample=4), torch.tensor(2.5))
    writer.flush()


def test_records_and_values_survive(tmp_path: Path) -> None:
    write(tmp_path)
    capture = Capture(tmp_path)
    gradient, loss = capture.records
    assert gradient.place == Place(
        shape=(4, 3), dim=0, ranges=((0, 2),), local_shape=(2, 3), valid=3, flat=(0, 6)
    )
    assert gradient.sum_over == ("dp",) and gradient.coordinates == {"tp": 0}
    assert gradient.norm == pytest.approx(55**0.5)
    assert capture.read(gradient).tolist() == [0, 1, 2, 3, 4, 5]
    assert loss.id == (1, "loss", "lm loss", 4, 0) and capture.read(loss).item() == 2.5
    assert capture.run == {"precision": "fp32"} and capture.sizes == {"tp": 2}


def test_records_may_have_axes_of_their_own(tmp_path: Path) -> None:
    sizes, own = {"dp": 2, "expert": 2, "expert_dp": 1}, {"expert": 1, "expert_dp": 0}
    writer = CaptureWriter(tmp_path, sizes=sizes, coordinates={"dp": 1})
    writer.add(Record(kind="gradient", name="w", step=1, coordinates=own), torch.ones(1))
    writer.add(Record(kind="gradient", name="v", step=1), torch.ones(1))
    writer.flush()
    capture = Capture(tmp_path)
    assert [record.coordinates for record in capture.records] == [own, {"dp": 1}]
    assert capture.num_ranks == 2


def test_beyond_the_limit_only_norms_are_written(tmp_path: Path) -> None:
    write(tmp_path, max_bytes=20)
    gradient, loss = Capture(tmp_path).records
    assert gradient.key is None and gradient.norm == pytest.approx(55**0.5) and loss.key is not None
    with pytest.raises(InputError, match="holds only the norm of gradient w"):
        Capture(tmp_path).read(gradient)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("run.json", "{", "is not JSON"),
        ("run.json", '{"format": "other"}', "is not a capture of version 1"),
        ("step_0000001/rank_00000.json", "{}", "a record is wrong or incomplete"),
        ("step_0000001/rank_00000.safetensors", "?", "cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    write(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(InputError, match=message):
        capture = Capture(tmp_path)
        capture.read(capture.records[0])


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "step_0000001" / "rank_00000.json"
    content = json.loads(path.read_text())
    content["records"][0]["kind"] = "weights"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="kind 'weights' is not one of mask, activation"):
        Capture(tmp_path)


def test_the_format_needs_no_process_group() -> None:
    source = Path(str(sys.modules[Capture.__module__].__file__)).read_text()
    assert "distributed" not in source and "parallel" not in source.replace("parallelism", "")
