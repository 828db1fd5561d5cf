"""Rendezvous of the processes of a run."""

from __future__ import annotations

import datetime
import time
import uuid

import torch.distributed as dist

POLL = 0.02  # seconds between two checks of rank 0 for new ranks


def meet(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """Join the processes that torchrun started, at MASTER_ADDR and MASTER_PORT.

    Returns:
        A store for these processes only, this one's rank, and their number.

    Raises:
        RuntimeError: not all joined within `timeout`.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(agree(store, rank, size, timeout), store), rank, size


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
        store.add(f"present {name}", 1)
        store.wait([f"complete {name}"], timeout)
        return name
    hellos = [f"hello {other}" for other in range(1, size)]
    store.wait(hellos, timeout)
    answered: set[bytes] = set()
    deadline = time.monotonic() + timeout.total_seconds()
    while store.add(f"present {word}", 0) < size - 1:
        for hello in set(store.multi_get(hellos)) - answered:
            store.set(f"welcome {hello.decode()}", word)
            answered.add(hello)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{size - 1 - store.add(f'present {word}', 0)} of {size} processes did not join"
            )
        time.sleep(POLL)
    store.set(f"complete {word}", "")
    return word
