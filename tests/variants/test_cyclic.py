from __future__ import annotations

import itertools

import pytest
import torch

from megatron.errors import InputError
from megatron.variants.cyclic import cyclic


def megatron_cyclic(total: int, consumed: int, mbs: int, rank: int, dp: int):
    """One epoch of microbatches from Megatron-LM's random sampler, written from its description."""
    active = total - total % (mbs * dp)
    epoch, current = consumed // active, consumed % active
    bucket = (total // (mbs * dp)) * mbs
    generator = torch.Generator()
    generator.manual_seed(epoch)
    order = torch.randperm(bucket, generator=generator)[current // dp :] + rank * bucket
    for start in range(0, len(order), mbs):
        yield order[start : start + mbs].tolist()


@pytest.mark.parametrize(("mbs", "dp"), [(1, 1), (2, 3), (4, 2)])
def test_cyclic_equals_megatron(mbs: int, dp: int) -> None:
    total, step = 53, mbs * dp
    for consumed in (0, step, 3 * step, total // step * step, 5 * (total // step * step) + 2 * step):
        for rank in range(dp):
            expected = []
            at = consumed
            while len(expected) < 100:
                for batch in megatron_cyclic(total, at, mbs, rank, dp):
                    expected.append(batch)
                    at += step
            ours = cyclic(total, consumed=consumed, micro_batch_size=mbs, dp_rank=rank, dp_size=dp)
            assert list(itertools.islice(ours, 100)) == expected[:100]


def test_cyclic_reads_every_sample_once_per_epoch() -> None:
    ranks = [cyclic(24, consumed=0, micro_batch_size=2, dp_rank=r, dp_size=3) for r in range(3)]
    for _ in range(3):
        epoch = [sample for rank in ranks for batch in itertools.islice(rank, 4) for sample in batch]
        assert sorted(epoch) == list(range(24))


def test_cyclic_refuses_invalid_sizes() -> None:
    with pytest.raises(InputError, match="5 samples do not fill one microbatch of 2 samples on 3 replicas"):
        next(cyclic(5, consumed=0, micro_batch_size=2, dp_rank=0, dp_size=3))
    with pytest.raises(InputError, match="the 7 consumed samples are not a multiple of 6"):
        next(cyclic(60, consumed=7, micro_batch_size=2, dp_rank=0, dp_size=3))
