"""Agreement on values of the host, over ranks that are threads of this process."""

from __future__ import annotations

import collections
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.collectives import host_max
from megatron.parallel.mesh import Axis


class Done:
    """A transfer that is complete."""

    def wait(self) -> None:
        pass


class Mail:
    """Messages between ranks, whose "group" is their own number."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.boxes: dict[tuple[int, int], queue.Queue[Tensor]] = collections.defaultdict(queue.Queue)
        self.sent: collections.Counter[int] = collections.Counter()
        patch.setattr(dist, "isend", self.send)
        patch.setattr(dist, "recv", self.receive)

    def send(self, x: Tensor, group: int, group_dst: int, **_: Any) -> Done:
        self.sent[group] += 1
        self.boxes[group, group_dst].put(x.clone())
        return Done()

    def receive(self, x: Tensor, group: int, group_src: int, **_: Any) -> None:
        x.copy_(self.boxes[group_src, group].get(timeout=60))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 11, 32])
def test_every_rank_learns_the_maximum(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ceil(log2 size) messages of each rank, whichever rank has the largest value."""
    mail = Mail(monkeypatch)
    axes = [Axis(rank, size, rank) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        for largest in range(size):
            values = [[rank == largest, -rank] for rank in range(size)]
            assert list(threads.map(host_max, values, axes)) == [[1, 0]] * size
    assert set(mail.sent.values()) <= {size * (size - 1).bit_length()}


def test_messages_of_a_large_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """14 at 16,384 ranks, where a ring has 32,766 one after the other."""
    mail = Mail(monkeypatch)
    monkeypatch.setattr(dist, "recv", lambda x, **_: None)
    assert host_max([7], Axis(5, 16384, 5)) == [7]
    assert mail.sent[5] == 14
