"""Rendezvous on a store that holds keys of earlier attempts."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
from distributed import free_port
from torch.distributed import TCPStore

from megatron.parallel.rendezvous import agree

TIMEOUT = datetime.timedelta(seconds=20)


def attempt(port: int, ranks: range, size: int, timeout: datetime.timedelta = TIMEOUT) -> list[str]:
    def one(rank: int) -> str:
        return agree(TCPStore("127.0.0.1", port, is_master=False, timeout=timeout), rank, size, timeout)

    with ThreadPoolExecutor(max_workers=len(ranks)) as threads:
        return list(threads.map(one, ranks))


def test_every_attempt_has_its_own_name() -> None:
    port = free_port()
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    names = [attempt(port, range(5), 5) for _ in range(4)]
    assert [len(set(ranks)) for ranks in names] == [1] * 4
    assert len({ranks[0] for ranks in names}) == 4
    # Attempts with missing ranks, with and without rank 0.
    short = datetime.timedelta(seconds=0.5)
    for ranks in (range(4), range(2, 5)):
        with pytest.raises(RuntimeError):
            attempt(port, ranks, 5, short)
    assert len(set(attempt(port, range(5), 5))) == 1
    del server
