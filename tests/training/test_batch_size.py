"""The constant global batch size."""

from __future__ import annotations

from megatron.training.batch_size import BatchSchedule


def test_constant() -> None:
    constant = BatchSchedule(global_batch_size=32, micro_batch_size=2, data_parallel_size=2)
    assert constant.batch_size(0) == constant.batch_size(10**9) == 32
    assert constant.num_microbatches(0) == 8
    assert constant.iterations(100) == 3
