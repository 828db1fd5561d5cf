"""Notes on resumed runs."""

from __future__ import annotations

import dataclasses

from megatron.faults.resume_notes import SCHEDULE_FLAGS
from megatron.optim.schedule import Schedule


def test_each_field_of_a_schedule_has_its_flags() -> None:
    assert list(SCHEDULE_FLAGS) == [field.name for field in dataclasses.fields(Schedule)]
