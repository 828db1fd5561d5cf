"""Stop a run before its last iteration on a signal."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

from megatron.parallel.collectives import host_max
from megatron.parallel.mesh import Mesh

# torchrun forwards a signal to processes that already had it from the terminal. A signal this soon after the first is
# the same request, not a second one.
SAME_REQUEST_SECONDS = 3.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopRequests:
    """Handles SIGINT, SIGTERM, SIGUSR1 (which SLURM sends before the time limit) and SIGHUP within a `with` block.

    After the first signal the run finishes the iteration, saves and exits; all processes stop at the same iteration. A
    second signal exits at once. The end of torchrun counts as SIGHUP. A signal that is ignored, as by nohup, stays so.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.started = time.monotonic()
        self.elapsed = 0  # seconds until `reason` was last called, the same on every process
        self.signal = 0  # the first one, on this or another process
        self.since: float | None = None  # when this process learned of it
        self.torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def __enter__(self) -> StopRequests:
        heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self.previous = {number: signal.signal(number, self._on_signal) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.since is not None and time.monotonic() - self.since > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt
        if self.since is None and self.mesh.is_first:
            name = signal.Signals(number).name
            with suppress(OSError):  # the terminal is gone
                sys.stderr.write(
                    f"\n{name} received: stopping after this iteration; a second one exits unsaved\n"
                )
        self._note(number)

    def _note(self, number: int) -> None:
        if self.since is None:
            self.signal, self.since = number, time.monotonic()

    def reason(self) -> str | None:
        """Reason to stop now, the same on every process; None to go on. Every process must call it."""
        if self.torchrun not in (None, os.getppid()):
            self._note(signal.SIGHUP)
        number, self.elapsed = host_max([self.signal, int(time.monotonic() - self.started)], self.mesh.world)
        if not number:
            return None
        self._note(number)
        return f"{signal.Signals(number).name} was received{' or torchrun ended' if number == signal.SIGHUP else ''}"

    @property
    def exit_code(self) -> int:
        """0, or after a signal 128 plus its number, as in a shell."""
        return 128 + self.signal if self.signal else 0
