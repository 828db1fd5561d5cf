"""Notices that a run stands still, finds out where each of its processes stands, and ends it.

A thread of each process looks once a second what has been done. If nothing for --hang-timeout, or if a communication
has failed, it calls the roll: through the store that brought the processes together, the threads of all others learn of
it, and answer where their main threads stand. The lowest rank that answers prints a summary, and all processes end.
A rank that gives no answer, or that is in no communication while the others wait in one, is where to look.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from types import TracebackType

import torch
import torch.distributed as dist

from megatron.flags import LostRank, tell
from megatron.parallel.collectives import all_reduce_max
from megatron.parallel.mesh import Mesh
from megatron.training.standing import Standing, cause, describe_here, standing, summary

LOOK = 1.0  # seconds between two looks at what has been done
ASK = 0.25  # seconds between two looks for what others are to write
# Seconds that answers are waited for. A thread may not get to run for a while if C code holds the interpreter.
ROLL_CALL = 5.0
# Seconds beyond the timeout after which faulthandler ends a process whose watchdog cannot run at all.
GRACE = 15.0


class Watchdog:
    """Watches over a `with` block that every process runs.

    If a communication fails in the block, the `LostRank` that comes out also says which process is the cause.
    """

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        """Every process must take part.

        Args:
            timeout: seconds in which something has to get done: a microbatch, a transfer, a file.
        """
        self.mesh, self.timeout = mesh, timeout
        self.store = connect(mesh)
        self.leaving = threading.Event()
        self.failed = False
        self.verdict, self.status = "", LostRank.exit_status
        self.done, self.since = 0, time.monotonic()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.thread.start()
        return self

    def __exit__(self, _: type | None, error: BaseException | None, __: TracebackType | None) -> None:
        self.failed = isinstance(error, LostRank)
        self.leaving.set()
        if isinstance(error, Exception) and not self.failed:
            self._leave_word(error)
        # torchrun ends all its processes as soon as one has ended; this one ends by itself once it knows why.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN) if self.failed else None
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self.failed:
            signal.signal(signal.SIGTERM, before)
            fault = LostRank(f"{error}; {self.verdict}")
            fault.exit_status = self.status
            raise fault from error

    def _leave_word(self, error: Exception) -> None:
        """Let the others know that this process ends by a fault of its own, and with which status."""
        self.thread.join()
        status = getattr(error, "exit_status", 1)
        if self.store is not None:
            with contextlib.suppress(dist.DistError):
                self.store.set(f"ended {self.mesh.world.rank}", json.dumps([status, str(error)[:500]]))

    def _watch(self) -> None:
        """The thread. Where the main thread does not end, this ends the process."""
        while not self._has_to_end():
            if self.leaving.is_set():
                return
        try:
            self.verdict = self._learn_why()
        except Exception as error:  # whatever it is, the process is to end
            self.verdict = f"why could not be learnt ({error!r})"
        failed = self.failed
        time.sleep(4 * ASK)  # the store may end with this process, and others have still to read it
        if not failed:
            tell(f"error: rank {self.mesh.world.rank} ends with the run: {self.verdict}")
            os._exit(self.status)

    def _has_to_end(self) -> bool:
        """Wait for the next look, or until the block ends; whether the run cannot go on."""
        # Fires if it is not put off again in time.
        faulthandler.dump_traceback_later(self.timeout + GRACE, exit=True, file=sys.__stderr__)
        if self.leaving.wait(LOOK):
            return self.failed
        if self.mesh.activity.steps != self.done:
            self.done, self.since = self.mesh.activity.steps, time.monotonic()
        return self._seconds() > self.timeout or self._called()

    def _seconds(self) -> float:
        """How long ago something was last seen to be done."""
        return time.monotonic() - self.since

    def _called(self) -> bool:
        """Whether another process has called the roll."""
        try:
            return self.store is not None and self.store.check(["called"])
        except dist.DistError:
            self.store = None
            return False

    def _learn_why(self) -> str:
        """Tell where this process stands, and learn which one is the cause."""
        here = standing(self.mesh, self._seconds())
        if here.seconds > self.timeout / 2:
            say(describe_here(self.mesh, here))
        why = (
            "a communication failed"
            if self.failed
            else f"nothing was done for {here.seconds:.0f} s (--hang-timeout)"
        )
        if self.mesh.world.size == 1:
            return f"{why}, in {here.function}"
        try:
            if self.store is not None:
                return self._call_the_roll(self.store, here, why)
        except dist.DistError:
            pass
        return "the store at MASTER_ADDR and MASTER_PORT is gone, which rank 0 or its torchrun keeps"

    def _call_the_roll(self, store: dist.Store, here: Standing, why: str) -> str:
        """Answer where this process stands; of all answers, print a summary or wait for who does. Gives the cause."""
        rank, size = self.mesh.world.rank, self.mesh.world.size
        if not store.check(["called"]):
            store.set("called", f"rank {rank} called the roll, as {why}")
        store.set(f"answer {rank}", json.dumps(dataclasses.asdict(here)))
        store.append("present", f"{rank} ")
        if store.add("number present", 1) == size:
            store.set("all present", "")
        wait_for(store, "all present")
        present = sorted(int(rank) for rank in store.get("present").split())
        if rank > present[0] or store.check(["verdict"]):
            if not wait_for(store, "verdict"):
                return "no rank could say why"
            self.status = int(store.get("status"))
            return store.get("verdict").decode()
        texts = store.multi_get([f"answer {rank}" for rank in present])
        answers = {rank: Standing(**json.loads(text)) for rank, text in zip(present, texts, strict=True)}
        ended = self._words(store, set(range(size)).difference(present))
        verdict = "; ".join(ended) or cause(answers, size)
        say(f"{store.get('called').decode()}; {verdict}\n{summary(answers, size, self.timeout / 2)}")
        store.set("status", str(self.status))
        store.set("verdict", verdict)
        return verdict

    def _words(self, store: dist.Store, missing: Iterable[int]) -> list[str]:
        """What ranks that are gone have said before, if it was a fault of theirs; their status becomes the run's."""
        found = []
        for rank in sorted(missing):
            if store.check([f"ended {rank}"]):
                self.status, message = json.loads(store.get(f"ended {rank}"))
                found.append(f"rank {rank} has ended: {message}")
        return found


def connect(mesh: Mesh) -> dist.Store | None:
    """A connection to the store that brought the processes together; None where there is but one.

    It is one of its own: a connection serves one thread at a time, and that of the process groups may be in use for
    minutes. Every process must take part.
    """
    if mesh.world.size == 1:
        return None
    # The store may outlive this run, and serve the one that torchrun starts after it.
    run = int(all_reduce_max(torch.tensor([time.time_ns()]), mesh.world))
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(f"watchdog {run}", dist.TCPStore(*address, wait_for_workers=False))


def wait_for(store: dist.Store, key: str) -> bool:
    """Whether a key is there within `ROLL_CALL` seconds. `Store.wait` would print warnings if it is not."""
    end = time.monotonic() + ROLL_CALL
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(ASK)
    return True


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
