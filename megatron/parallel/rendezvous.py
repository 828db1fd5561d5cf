"""How the processes of a run meet."""

from __future__ import annotations

import datetime
import time
import uuid

import torch.distributed as dist

POLL = 0.02  # seconds between two looks of rank 0 for who has come


def meet(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """Meet the processes that torchrun started, at MASTER_ADDR and MASTER_PORT.

    Returns:
        A store that only these processes use, this one's rank, and how many they are.

    Raises:
        RuntimeError: they did not come within `timeout`.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(agree(store, rank, size, timeout), store), rank, size


def agree(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> str:
    """A name for this attempt at running, the same on every rank, and another one for every attempt.

    With --max-restarts, torchrun keeps one store for all attempts. A process that took from it an address that one of
    an earlier attempt has left there would wait for a process that is gone. So each rank leaves a word never used
    before, and rank 0 answers it with its own, again if an old word is replaced, until as many have taken that up.
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
                f"{size - 1 - store.add(f'present {word}', 0)} of {size} processes have not come"
            )
        time.sleep(POLL)
    store.set(f"complete {word}", "")
    return word
