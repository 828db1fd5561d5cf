"""Rendezvous of the processes of a run."""

from __future__ import annotations

import datetime
import functools
import os
import sys
import time
import uuid
from collections.abc import Iterable

import torch.distributed as dist

REPORT_INTERVAL = 60.0  # seconds between two lines about absent ranks
serve = functools.cache(dist.TCPStore)  # stays, since another rank may begin its next run first


def rank_names(ranks: Iterable[int]) -> str:
    """Format ranks: "rank 3", "ranks 0-2, 5"; only the first ranges if there are many."""
    stretches: list[list[int]] = []
    for rank in sorted(ranks):
        if stretches and rank == stretches[-1][1] + 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in stretches]
    text = ", ".join(shown[:16]) + (", ..." if len(shown) > 16 else "")
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def meet(rank: int, size: int, address: tuple[str, int], timeout: datetime.timedelta) -> dist.Store:
    """Join the other processes at an address. Returns a store for these processes only.

    Raises:
        RuntimeError: not all joined within `timeout`. That of rank 0 names the absent ranks.
    """
    # torchrun serves the store; without it (srun, for example) rank 0 does. torch tries twice, and waits in between.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    make = serve if serves else dist.TCPStore
    store = make(*address, None, serves, timeout / 3, wait_for_workers=False, multi_tenant=True)
    store.set_timeout(timeout)
    return dist.PrefixStore(agree(store, rank, size, timeout), store)


def agree(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> str:
    """Agree on a name for this attempt of the run: the same on every rank, and new for every attempt.

    With --max-restarts, torchrun keeps one store for all attempts. A rank that read an address of an earlier attempt
    from it would wait for a process that is gone. So each rank writes a new random word, and rank 0 replies to it with
    its own, again if a rank replaces its word, until all ranks have acknowledged the reply.
    """
    word = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello {rank}", word)
        name = store.get(f"welcome {word}").decode()
        store.set(f"present {name} {rank}", "")
        store.wait([f"complete {name}"], timeout)
        return name
    absent, begin, next_report = list(range(1, size)), time.monotonic(), REPORT_INTERVAL
    while absent := [other for other in absent if not store.check([f"present {word} {other}"])]:
        for other in absent:
            if store.check([f"hello {other}"]):
                store.set(f"welcome {store.get(f'hello {other}').decode()}", word)
        waited = time.monotonic() - begin
        if waited > timeout.total_seconds():
            raise RuntimeError(f"waited {waited:.0f} s for {rank_names(absent)}")
        if waited > next_report:
            next_report += REPORT_INTERVAL
            print(f"rank 0 has waited {waited:.0f} s for {rank_names(absent)}", file=sys.stderr, flush=True)
        time.sleep(min(1, 0.02 + waited / 10))
    store.set(f"complete {word}", "")
    return word
