"""Positions of the ranks of context parallelism."""

from __future__ import annotations

import pytest
import torch

from megatron.data.zigzag import Zigzag


@pytest.mark.parametrize(
    ("length", "size", "segments"),
    [
        (4096, 1, 1),
        (4096, 2, 16),
        (4096, 4, 8),
        (4096, 8, 4),
        (8192, 4, 16),
        (32, 4, 2),  # fewer than 64 positions, but two segments
        (8, 4, 1),  # chunks of one position
        (4000, 2, 10),  # 1,000 positions do not divide into 15 chunks or 11
        (2 * 2 * 997, 2, 1),  # a prime
    ],
)
def test_documents_are_divided_in_segments_that_divide_the_length(
    length: int, size: int, segments: int
) -> None:
    assert Zigzag.of(length, size, documents=True) == Zigzag(length, size, segments)
    assert Zigzag.of(length, size, documents=False) == Zigzag(length, size, 1)


def test_a_rank_has_two_chunks_of_each_segment() -> None:
    zigzag = Zigzag(64, 2, 2)
    assert zigzag.ranges(0) == [(0, 8), (24, 32), (32, 40), (56, 64)]
    assert zigzag.ranges(1) == [(8, 16), (16, 24), (40, 48), (48, 56)]


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_forms_of_a_division_agree(size: int, segments: int) -> None:
    zigzag, x = Zigzag(48, size, segments), torch.randn(2, 48, 3)
    parts = [zigzag.shard(x, 1, rank) for rank in range(size)]
    for rank, part in enumerate(parts):
        torch.testing.assert_close(
            part, torch.cat([x[:, begin:end] for begin, end in zigzag.ranges(rank)], 1)
        )
        positions = zigzag.positions(rank, torch.arange(48 // size))
        assert positions.tolist() == [zigzag.positions(rank, row) for row in range(48 // size)]
        torch.testing.assert_close(part, x[:, positions])
    assert torch.equal(zigzag.restore(torch.stack(parts).transpose(1, 2)), x.transpose(0, 1))
