"""Watchdog: detect a run that hangs, report the status of every rank, and end it.

A thread of each process checks for progress once a second. After --hang-timeout seconds without any, or when a
communication fails, it starts a roll call through the rendezvous store: the threads of all ranks see it there and
answer with the status of their main threads. The lowest rank that answers prints a summary, and all processes exit. The
culprit is a rank that gives no answer, or one in no communication while the others wait in one.
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
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch.distributed as dist

from megatron.errors import LostRank, report_fatal
from megatron.faults.config import FaultsConfig
from megatron.faults.rank_status import RankStatus, cause, describe_here, rank_status, summary
from megatron.parallel.collectives import host_max
from megatron.parallel.mesh import Mesh
from megatron.training.loop import Hook, Trainer

CHECK_INTERVAL = 1.0  # seconds between checks for progress
POLL_INTERVAL = 0.25  # seconds between reads of the store
# Seconds to wait for answers. A thread may not run for a while if C code holds the GIL.
ROLL_CALL = 5.0
# Seconds after the timeout at which faulthandler ends a process whose watchdog thread cannot run.
GRACE = 15.0


class HangDetection(Hook):
    """Watch the run for --hang-timeout seconds without progress."""

    def during_run(self, trainer: Trainer) -> AbstractContextManager[object]:
        timeout = trainer.config.plugin(FaultsConfig).hang_timeout
        return Watchdog(trainer.mesh, timeout) if timeout else nullcontext()


class Watchdog:
    """Watches a `with` block that every process runs.

    If a communication fails in the block, the `LostRank` that leaves it names the rank that caused it.
    """

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        """Every process must call it.

        Args:
            timeout: seconds without progress (a microbatch, a transfer, a file) before the run is ended.
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
            self._record_error(error)
        # torchrun ends all processes once one has exited; this one waits until it knows the cause.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN) if self.failed else None
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self.failed:
            signal.signal(signal.SIGTERM, before)
            fault = LostRank(f"{error}; {self.verdict}")
            fault.exit_status = self.status
            raise fault from error

    def _record_error(self, error: Exception) -> None:
        """Record in the store that this process ends by an error of its own, with its exit status."""
        self.thread.join()
        status = getattr(error, "exit_status", 1)
        if self.store is not None:
            with contextlib.suppress(dist.DistError):
                self.store.set(f"ended {self.mesh.world.rank}", json.dumps([status, str(error)[:500]]))

    def _watch(self) -> None:
        """Body of the thread. Ends the process if the main thread does not."""
        while not self._must_abort():
            if self.leaving.is_set():
                return
        try:
            self.verdict = self._determine_cause()
        except Exception as error:  # the process must end in any case
            self.verdict = f"the cause could not be determined ({error!r})"
        failed = self.failed
        time.sleep(4 * POLL_INTERVAL)  # the store may end with this process while others still read it
        if not failed:
            report_fatal(f"error: rank {self.mesh.world.rank} ends with the run: {self.verdict}")
            os._exit(self.status)

    def _must_abort(self) -> bool:
        """Wait for the next check or the end of the block. Returns True if the run must end."""
        # Fires unless the next check postpones it.
        assert sys.__stderr__ is not None
        faulthandler.dump_traceback_later(self.timeout + GRACE, exit=True, file=sys.__stderr__)
        if self.leaving.wait(CHECK_INTERVAL):
            return self.failed
        if self.mesh.heartbeat.steps != self.done:
            self.done, self.since = self.mesh.heartbeat.steps, time.monotonic()
        return self._seconds() > self.timeout or self._called()

    def _seconds(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self.since

    def _called(self) -> bool:
        """True if another process has started a roll call."""
        try:
            return self.store is not None and self.store.check(["called"])
        except dist.DistError:
            self.store = None
            return False

    def _determine_cause(self) -> str:
        """Report the status of this process, and determine the cause. Returns it."""
        here = rank_status(self.mesh, self._seconds())
        if here.seconds > self.timeout / 2:
            log(describe_here(self.mesh, here))
        why = (
            "a communication failed"
            if self.failed
            else f"no progress for {here.seconds:.0f} s (--hang-timeout)"
        )
        if self.mesh.world.size == 1:
            return f"{why}, in {here.function}"
        try:
            if self.store is not None:
                return self._run_roll_call(self.store, here, why)
        except dist.DistError:
            pass
        return (
            "the rendezvous store at MASTER_ADDR:MASTER_PORT (held by rank 0 or its torchrun) is unreachable; check "
            "that machine"
        )

    def _run_roll_call(self, store: dist.Store, here: RankStatus, why: str) -> str:
        """Answer the roll call; print the summary of all answers, or wait for the rank that does. Returns the cause."""
        rank, size = self.mesh.world.rank, self.mesh.world.size
        if not store.check(["called"]):
            store.set("called", f"roll call by rank {rank}: {why}")
        store.set(f"answer {rank}", json.dumps(dataclasses.asdict(here)))
        store.append("present", f"{rank} ")  # type: ignore[attr-defined] # missing from torch's stubs
        if store.add("number present", 1) == size:
            store.set("all present", "")
        wait_for(store, "all present")
        present = sorted(int(rank) for rank in store.get("present").split())
        if rank > present[0] or store.check(["verdict"]):
            if not wait_for(store, "verdict"):
                return "no rank could determine the cause"
            self.status = int(store.get("status"))
            return store.get("verdict").decode()
        texts = store.multi_get([f"answer {rank}" for rank in present])
        answers = {rank: RankStatus(**json.loads(text)) for rank, text in zip(present, texts, strict=True)}
        ended = self._recorded_errors(store, set(range(size)).difference(present))
        verdict = "; ".join(ended) or cause(answers, size)
        log(f"{store.get('called').decode()}; {verdict}\n{summary(answers, size, self.timeout / 2)}")
        store.set("status", str(self.status))
        store.set("verdict", verdict)
        return verdict

    def _recorded_errors(self, store: dist.Store, missing: Iterable[int]) -> list[str]:
        """Errors that ranks without an answer recorded before they ended; their exit status becomes the run's."""
        found = []
        for rank in sorted(missing):
            if store.check([f"ended {rank}"]):
                self.status, message = json.loads(store.get(f"ended {rank}"))
                found.append(f"rank {rank} has ended: {message}")
        return found


def connect(mesh: Mesh) -> dist.Store | None:
    """Connect to the rendezvous store; None with a single process. Every process must call it.

    The watchdog has a connection of its own: a connection serves one thread at a time, and that of the process groups
    may be busy for minutes.
    """
    if mesh.world.size == 1:
        return None
    # The store may outlive this run and serve the next one that torchrun starts.
    (run,) = host_max([time.time_ns()], mesh.world)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(f"watchdog {run}", dist.TCPStore(*address, wait_for_workers=False))


def wait_for(store: dist.Store, key: str) -> bool:
    """Wait up to `ROLL_CALL` seconds for a key. Returns False if it is not there; `Store.wait` would print warnings."""
    end = time.monotonic() + ROLL_CALL
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(POLL_INTERVAL)
    return True


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
