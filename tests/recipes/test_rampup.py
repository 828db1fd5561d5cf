"""Growth of the global batch, compared with Megatron-LM's rule."""

from __future__ import annotations

import pytest

from megatron.errors import InputError
from megatron.recipes.rampup import RampUp
from megatron.training.batch_size import BatchSchedule


def schedule(global_batch_size=32, micro_batch_size=2, data_parallel_size=2, rampup=None) -> BatchSchedule:
    sizes = {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "data_parallel_size": data_parallel_size,
    }
    return BatchSchedule(**sizes) if rampup is None else RampUp(**sizes, rampup=rampup)


def megatron_batch_size(consumed: int, final: int, start: int, increment: int, samples: int) -> int:
    increments = (final - start) / increment
    if consumed > samples:
        return final
    return start + int(consumed / (samples / increments)) * increment


@pytest.mark.parametrize(
    "rampup", [(8, 8, 300), (4, 4, 1000), (16, 16, 7), (28, 4, 1), (12, 20, 99), (4, 4, 65)]
)
def test_ramp_matches_megatron(rampup: tuple[int, int, int]) -> None:
    """In the last case, rounding leaves the step at the end of the ramp one increment short, as in Megatron-LM."""
    ramp = schedule(rampup=rampup)
    for consumed in range(rampup[2] + 100):
        size = megatron_batch_size(consumed, 32, *rampup)
        assert ramp.batch_size(consumed) == size
        assert ramp.num_microbatches(consumed) == size // 4
    assert ramp.batch_size(0) == rampup[0]
    assert ramp.batch_size(rampup[2] + 1) == 32


@pytest.mark.parametrize("train_samples", [1, 8, 15, 16, 100, 300, 1000, 12345])
def test_iterations_match_a_run(train_samples: int) -> None:
    for rampup in (None, (8, 8, 300), (4, 4, 1000)):
        batches = schedule(rampup=rampup)
        consumed = steps = 0
        while consumed + batches.batch_size(consumed) <= train_samples:
            consumed += batches.batch_size(consumed)
            steps += 1
        assert batches.iterations(train_samples) == steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"global_batch_size": 30},
            "--global-batch-size 30 is not a multiple of 4, the --micro-batch-size of 2",
        ),
        ({"rampup": (8, 8)}, "--rampup-batch-size 8 8: needs three numbers"),
        ({"rampup": (0, 8, 100)}, "must be at least 1"),
        ({"rampup": (8, 0, 100)}, "must be at least 1"),
        ({"rampup": (8, 8, 0)}, "must be at least 1"),
        ({"rampup": (32, 8, 100)}, "START must be less than --global-batch-size 32"),
        ({"rampup": (40, 8, 100)}, "START must be less than --global-batch-size 32"),
        ({"rampup": (8, 16, 100)}, "steps of 16 do not lead from 8 to --global-batch-size 32"),
        ({"rampup": (8, 6, 100)}, r"--rampup-batch-size 8 6 100: its batch size 14 is not a multiple of 4"),
        ({"rampup": (2, 6, 100)}, r"--rampup-batch-size 2 6 100: its batch size 2 is not a multiple of 4"),
    ],
)
def test_wrong_sizes(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        schedule(**arguments)
