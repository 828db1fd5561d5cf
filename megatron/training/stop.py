"""When a run ends before its last iteration: signals and the flags that bound it."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

import torch

from megatron.parallel.collectives import all_reduce_max
from megatron.parallel.mesh import Mesh
from megatron.training.config import TrainingConfig

# torchrun passes a signal on to processes that the terminal has already sent it to. What follows this soon
# on the first is the same request, not an impatient second one.
SAME_REQUEST_SECONDS = 3.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """Notices SIGINT, SIGTERM and SIGUSR1 (which SLURM sends before its time limit).

    All processes agree on stopping at the same iteration.

    Within a `with` block the first signal lets the iteration end and the run save; a second one leaves at once.
    """

    def __init__(self, config: TrainingConfig, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.started = time.monotonic()
        self.signal = 0  # the first one that came, here or on another process
        self.since: float | None = None  # when this process learnt of it

    def __enter__(self) -> StopRequests:
        self.previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.since is not None and time.monotonic() - self.since > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt
        if self.since is None and self.mesh.is_first:
            name = signal.Signals(number).name
            sys.stderr.write(
                f"\n{name} received: stopping after this iteration; a second one stops at once, unsaved\n"
            )
        self._note(number)

    def _note(self, number: int) -> None:
        if self.since is None:
            self.signal, self.since = number, time.monotonic()

    def reason(self, iteration: int) -> str | None:
        """Why to stop after `iteration`, the same on every process; None to go on. Every process must ask."""
        minutes = self.config.exit_duration_in_mins
        over = minutes is not None and time.monotonic() - self.started > 60 * minutes
        # On the CPU, so that agreeing does not wait for the GPU.
        number, over = all_reduce_max(torch.tensor([self.signal, int(over)]), self.mesh.world).tolist()
        if number:
            self._note(number)
            return f"{signal.Signals(number).name} was received"
        if over:
            return f"--exit-duration-in-mins {minutes} is over"
        if self.config.exit_interval and iteration % self.config.exit_interval == 0:
            return f"iteration {iteration} is a multiple of --exit-interval {self.config.exit_interval}"
        return None

    @property
    def exit_code(self) -> int:
        """0, or after a signal what a shell expects of it: 130 for SIGINT, 138 for SIGUSR1, 143 for SIGTERM."""
        return 128 + self.signal if self.signal else 0
