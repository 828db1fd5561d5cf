"""Records of ranks against tensors of the whole model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.verify.assemble import assemble, inferred_place
from megatron.verify.compare import Comparer, Comparison
from megatron.verify.format import Capture, CaptureWriter, Place, Record
from megatron.verify.reference import Reference
from megatron.verify.runner import compare_captures
from megatron.verify.tolerance import Rounding

ROUNDING = Rounding("fp32", 16, 16, 16)
WHOLE = torch.arange(1.0, 25.0).view(6, 4)


def capture(folder: Path, records: list[tuple[int, Record, Tensor]], tp: int = 1) -> Capture:
    """Write records, each with the rank that holds it, and read the capture."""
    for rank in range(tp):
        writer = CaptureWriter(
            folder, rank=rank, coordinates={"pp": 0, "dp": 0, "tp": rank}, sizes={"tp": tp}
        )
        for owner, record, values in records:
            if owner == rank:
                writer.add(record, values)
        writer.flush()
    return Capture(folder)


def gradient(place: Place | None = None, name: str = "w") -> Record:
    return Record(kind="gradient", name=name, step=1, place=place)


def compare(folder: Path, theirs: list[tuple[int, Record, Tensor]], tp: int = 2) -> list[Comparison]:
    mine = capture(folder / "one", [(0, gradient(), WHOLE)])
    other = capture(folder / "two", theirs, tp)
    return list(Comparer(Reference(mine, [], ROUNDING)).compare(other, steps=range(2)))


ROWS = ((0, 1), (3, 5)), ((1, 3), (5, 6))  # two ranges of rows on each rank


def rows(rank: int, **changes: object) -> Place:
    place = Place(shape=(6, 4), dim=0, ranges=ROWS[rank], local_shape=(3, 4))
    return dataclasses.replace(place, **changes)


def local(rank: int) -> Tensor:
    return torch.cat([WHOLE[begin:end] for begin, end in ROWS[rank]])


def test_split_rows_and_a_fault_in_one(tmp_path: Path) -> None:
    wrong = local(1) * (1 + 1e-4)
    found = compare(tmp_path, [(0, gradient(rows(0)), local(0)), (1, gradient(rows(1)), wrong)])
    assert [(c.record.rank, c.passed) for c in found] == [(0, True), (1, False)]
    assert found[1].difference == pytest.approx(1e-4 * float(local(1).norm()), rel=1e-2)


def test_terms_of_a_bias_that_cancel(tmp_path: Path) -> None:
    """The gradient 0.001 of a bias is a sum of terms of 0.0625, each of whose fp32 neighbors is 2^-28 away."""
    terms = torch.tensor([[0.0625, -0.0625], [-0.0615, 0.0615]])
    rows = Record(kind="activation gradient", name="head", step=1, sample=0)
    grad = Record(kind="gradient", name="head.bias", step=1)
    moment = Record(kind="state", name="exp_avg/head.bias", step=1)

    def written(name: str, error: float) -> Capture:
        sums = terms.double().sum(0) + error
        records = [(0, rows, terms), (0, grad, sums), (0, moment, sums / 10)]
        return capture(tmp_path / name, records)

    comparer = Comparer(Reference(written("one", 0), [], ROUNDING))
    for error, passed in (2**-27, True), (1e-6, False):
        found = list(comparer.compare(written(str(error), error), steps=range(2)))
        assert [(c.record.kind, c.passed) for c in found] == [
            ("activation gradient", True),
            ("gradient", passed),
            ("state", passed),
        ]


def test_split_columns(tmp_path: Path) -> None:
    places = [Place(shape=(6, 4), dim=1, ranges=((2 * r, 2 * r + 2),), local_shape=(6, 2)) for r in (0, 1)]
    parts = [WHOLE[:, :2], WHOLE[:, 2:]]
    assert all(c.passed for c in compare(tmp_path, [(r, gradient(places[r]), parts[r]) for r in (0, 1)]))


def test_flat_parts_of_the_distributed_optimizer(tmp_path: Path) -> None:
    place = Place(shape=(6, 4), dim=0, ranges=((0, 6),), local_shape=(6, 4))
    cuts = [(0, 7), (7, 24)]
    theirs = [
        (r, gradient(dataclasses.replace(place, flat=cuts[r])), WHOLE.flatten()[slice(*cuts[r])])
        for r in (0, 1)
    ]
    assert all(c.passed for c in compare(tmp_path, theirs))
    found = compare(tmp_path / "missing", theirs[:1])
    assert [c.fault for c in found] == ["", "no rank has 17 of its 24 elements"]


def test_padding_rows_are_not_compared(tmp_path: Path) -> None:
    padded = torch.cat((WHOLE, torch.full((2, 4), 99.0)))
    places = [
        Place(shape=(8, 4), dim=0, ranges=((4 * r, 4 * r + 4),), local_shape=(4, 4), valid=6) for r in (0, 1)
    ]
    theirs = [(r, gradient(places[r]), padded[4 * r : 4 * r + 4]) for r in (0, 1)]
    assert all(c.passed for c in compare(tmp_path, theirs))


def test_sums_over_ranks(tmp_path: Path) -> None:
    record = dataclasses.replace(gradient(), kind="metric", sum_over=("tp",))
    mine = capture(tmp_path / "one", [(0, record, torch.tensor(3.0))])
    other = capture(tmp_path / "two", [(r, record, torch.tensor(1.0 + r)) for r in (0, 1)], tp=2)
    (found,) = Comparer(Reference(mine, [], ROUNDING)).compare(other, steps=range(2))
    assert found.passed


def test_a_sum_that_one_rank_did_not_write_is_not_compared(tmp_path: Path) -> None:
    record = dataclasses.replace(gradient(), kind="metric", sum_over=("tp",))
    mine = capture(tmp_path / "one", [(0, record, torch.tensor(3.0))])
    other = capture(tmp_path / "two", [(r, record, torch.tensor(1.0 + r)) for r in (0, 1)], tp=2)
    other.records[1] = dataclasses.replace(other.records[1], key=None)
    comparer = Comparer(Reference(mine, [], ROUNDING))
    assert not list(comparer.compare(other, steps=range(2)))
    assert comparer.skipped == {"tensors beyond the capture's size": 1}


def test_activations_of_a_reference_of_several_tensor_parallel_ranks_are_not_compared(tmp_path: Path) -> None:
    """The part that each rank has is known only beside the whole; gradients have a place."""
    activation = dataclasses.replace(gradient(), kind="activation", sample=0)
    parts = [(r, activation, WHOLE[:, 2 * r : 2 * r + 2]) for r in (0, 1)]
    places = [(r, gradient(rows(r)), local(r)) for r in (0, 1)]
    mine = capture(tmp_path / "two", [*parts, *places], tp=2)
    other = capture(tmp_path / "one", [(0, activation, WHOLE), (0, gradient(), WHOLE)])
    comparer = Comparer(Reference(mine, [], ROUNDING))
    (found,) = comparer.compare(other, steps=range(2))
    assert found.passed and found.record.kind == "gradient"
    assert comparer.skipped == {"activations and masks of a reference with several tensor-parallel ranks": 1}


def test_tensors_that_the_reference_lacks_are_counted(tmp_path: Path) -> None:
    mine = capture(tmp_path / "one", [(0, gradient(), WHOLE)])
    other = capture(tmp_path / "two", [(0, gradient(), WHOLE), (0, gradient(name="v"), WHOLE)])
    comparer = Comparer(Reference(mine, [], ROUNDING))
    assert len(list(comparer.compare(other, steps=range(2)))) == 1
    assert comparer.skipped == {"tensors that the reference lacks": 1}


def test_gradients_that_ranks_have_a_part_of_are_not_compared(tmp_path: Path) -> None:
    """All ranks share the normalized keys of one query group."""
    record = dataclasses.replace(gradient(), kind="activation gradient")
    mine = capture(tmp_path / "one", [(0, record, WHOLE)])
    for partial, compared in ((True, 0), (False, 2)):
        theirs = [(r, dataclasses.replace(record, partial=partial), WHOLE / 2) for r in (0, 1)]
        other = capture(tmp_path / str(partial), theirs, tp=2)
        comparer = Comparer(Reference(mine, [], ROUNDING))
        assert len(list(comparer.compare(other, steps=range(2)))) == compared
        assert sum(comparer.skipped.values()) == 2 - compared


def test_an_infinite_bound_passes_nothing() -> None:
    found = Comparison(record=gradient(), order=0, difference=1.0, norm=math.inf, bound=math.inf)
    assert not found.passed


def test_captures_that_start_from_a_checkpoint(tmp_path: Path) -> None:
    """Its state is compared exactly, and the step after it within a bound."""
    records = [
        (0, Record(kind="parameter", name="w", step=7), WHOLE),
        (0, Record(kind="gradient", name="w", step=8), WHOLE),
    ]
    mine = capture_steps(tmp_path / "one", records)
    for factor, passes in ((1.0, [True, True]), (1 + 1e-7, [False, True])):
        other = capture_steps(tmp_path / str(factor), [(r, x, factor * y) for r, x, y in records])
        found = Comparer(Reference(mine, [], ROUNDING)).compare(other, steps=range(9))
        assert [c.passed for c in found] == passes


def capture_steps(folder: Path, records: list[tuple[int, Record, Tensor]]) -> Capture:
    """Write records of one rank in several steps, and read the capture."""
    writer = CaptureWriter(folder, sizes={"tp": 1})
    for _, record, values in records:
        writer.add(record, values)
        writer.flush()
    return Capture(folder)


def test_what_another_program_lacks_is_counted(tmp_path: Path) -> None:
    update = (0, Record(kind="update", name="w", step=1), WHOLE)
    capture(tmp_path / "one", [(0, gradient(), WHOLE), update])
    capture(tmp_path / "two", [(0, gradient(), WHOLE)])
    capture(tmp_path / "state", [(0, Record(kind="state", name="w", step=1), WHOLE)])
    check = compare_captures([tmp_path / name for name in ("one", "two", "one")])
    assert check.passed and check.compared == 1
    assert check.skipped["values that the other capture lacks"] == 1
    check = compare_captures([tmp_path / "one", tmp_path / "state"])
    assert not check.passed and "no step and kind of tensor in common" in check.error


def test_missing_tensors_and_wrong_shapes_are_faults(tmp_path: Path) -> None:
    assert [c.fault for c in compare(tmp_path, [(0, gradient(name="v"), WHOLE)])] == ["no rank has it"]
    (found, *_) = compare(tmp_path / "shape", [(0, gradient(), WHOLE[:, :3].flatten())])
    assert "its shape is [18], and the reference's is [6, 4]" in found.fault


def test_assembly(tmp_path: Path) -> None:
    other = capture(tmp_path, [(r, gradient(rows(r)), local(r)) for r in (0, 1)], tp=2)
    whole = assemble(other, other.records)
    assert whole is not None and whole.tolist() == WHOLE.tolist()
    assert assemble(other, other.records[:1]) is None


def test_padding_rows_of_a_tensor_that_is_split_along_columns(tmp_path: Path) -> None:
    padded = torch.cat((WHOLE, torch.full((2, 4), 99.0)))
    places = [
        Place(shape=(8, 4), dim=1, ranges=((2 * r, 2 * r + 2),), local_shape=(8, 2), valid=6) for r in (0, 1)
    ]
    theirs = [(r, gradient(places[r]), padded[:, 2 * r : 2 * r + 2]) for r in (0, 1)]
    assert all(c.passed for c in compare(tmp_path, theirs))


@pytest.mark.parametrize(
    ("shape", "whole", "rank", "size", "expected"),
    [
        ((2, 3, 4), (2, 6, 4), 1, 2, (1, (3, 6))),
        ((2, 1, 4), (2, 2, 4), 2, 4, (1, (1, 2))),  # two groups of heads on four ranks
        ((2, 1, 4), (2, 2, 4), 1, 4, (1, (0, 1))),
    ],
)
def test_inferred_places(shape: tuple, whole: tuple, rank: int, size: int, expected: tuple) -> None:
    place = inferred_place(shape, whole, rank, size)
    assert place is not None and (place.dim, place.ranges) == (expected[0], (expected[1],))


def test_unclear_places_are_not_inferred() -> None:
    assert inferred_place((2, 3), (4, 6), 0, 2) is None
    assert inferred_place((2, 4), (2, 6), 0, 2) is None


def test_updates_of_elements_without_a_gradient_may_differ(tmp_path: Path) -> None:
    # Adam moves the last element, whose gradient is 0 up to rounding, by rounding alone.
    grads, updates = torch.ones(100), torch.full((100,), 1e-3)
    grads[-1] = 1e-9
    records = [(0, Record(kind="parameter", name="w", step=0), torch.zeros(100))]
    records += [(0, Record(kind="gradient", name="w", step=1), grads)]
    reference = capture(tmp_path / "one", [*records, (0, Record(kind="update", name="w", step=1), updates)])
    comparer = Comparer(Reference(reference, [], Rounding("fp32", 64, 64, 64)))
    for element, passes in ((-1, True), (0, False)):
        changed = updates.clone()
        changed[element] = -1e-3
        theirs = [*records, (0, Record(kind="update", name="w", step=1), changed)]
        other = capture(tmp_path / str(element), theirs)
        assert all(c.passed for c in comparer.compare(other, steps=range(2))) == passes


def test_updates_of_large_weights_are_rounded_with_the_weight(tmp_path: Path) -> None:
    grads, updates, ulp = torch.ones(100), torch.full((100,), 1e-6), 2.0**-23
    records = [
        (0, Record(kind="parameter", name="w", step=0), torch.ones(100)),
        (0, Record(kind="gradient", name="w", step=1), grads),
        (0, Record(kind="parameter", name="w", step=1), torch.ones(100)),
    ]
    reference = capture(tmp_path / "one", [*records, (0, Record(kind="update", name="w", step=1), updates)])
    comparer = Comparer(Reference(reference, [], Rounding("fp32", 64, 64, 64)))
    for ulps, passes in ((1, True), (2, False)):
        theirs = [*records, (0, Record(kind="update", name="w", step=1), updates + ulps * ulp)]
        other = capture(tmp_path / str(ulps), theirs)
        assert all(c.passed for c in comparer.compare(other, steps=range(2))) == passes
