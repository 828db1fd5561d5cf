from __future__ import annotations

import itertools

import pytest

from megatron.data.samplers import sequential


@pytest.mark.parametrize("consumed", [0, 12, 13])
def test_sequential_order(consumed: int) -> None:
    """Microbatch m of replica r holds samples [m * mbs * dp + r * mbs, + mbs) of those not yet consumed."""
    mbs, dp, total = 2, 3, 40
    for rank in range(dp):
        ours = sequential(
            range(consumed, total), micro_batch_size=mbs, dp_rank=rank, dp_size=dp, drop_last=True
        )
        expected = [
            list(range(start + rank * mbs, start + rank * mbs + mbs))
            for start in range(consumed, total - mbs * dp + 1, mbs * dp)
        ]
        assert [list(batch) for batch in ours] == expected


def test_sequential_without_drop_last() -> None:
    for total, mbs, dp in itertools.product(range(14), (1, 2, 3), (1, 2, 4)):
        ranks = [
            list(sequential(range(total), micro_batch_size=mbs, dp_rank=r, dp_size=dp, drop_last=False))
            for r in range(dp)
        ]
        assert {len(batches) for batches in ranks} == {-(-total // (mbs * dp))}
        assert sorted(i for batches in ranks for batch in batches for i in batch) == list(range(total))
        assert all(len(batch) <= mbs for batches in ranks for batch in batches)
