"""Save checkpoints in a background thread (--async-save)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.save import Saver, Snapshot, take_snapshot
from megatron.errors import TrainingFault
from megatron.ops.host_memory import host_zeros
from megatron.parallel.apart import world_apart
from megatron.parallel.collectives import host_max
from megatron.performance.config import PerformanceConfig
from megatron.training.loop import Hook, Trainer


class AsyncSaving(Hook):
    """Save in the background (--async-save)."""

    @contextmanager
    def during_training(self, trainer: Trainer) -> Iterator[None]:
        self.saver: AsyncSaver | None = None
        if not trainer.config.plugin(PerformanceConfig).async_save:
            yield
            return
        with AsyncSaver(**vars(trainer.saver)) as self.saver:
            trainer.saver = self.saver
            yield

    def after_step(self, trainer: Trainer) -> None:
        if self.saver is not None:
            self.saver.check()


@dataclasses.dataclass
class AsyncSaver(Saver):
    """Saves checkpoints in a thread, from a copy in host memory. A context manager; every method is collective.

    Leaving the `with` block waits for the thread, unless KeyboardInterrupt or SystemExit leaves it.

    Attributes:
        writing: the thread; None if nothing is being written.
        failure: raised in the thread.
    """

    writing: threading.Thread | None = None
    failure: BaseException | None = None

    def __enter__(self) -> AsyncSaver:
        # Allocated before training, so that a lack of memory does not show only at the first save.
        snapshot = take_snapshot(self.config, {}, self.buffer, self.optimizer)
        self.copy = HostCopy(snapshot, self.buffer.mesh.device)
        self.world = world_apart(self.buffer.mesh.world, self.buffer.config)
        return self

    def __exit__(self, kind: type[BaseException] | None, _: Any, __: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):
            try:
                self.wait()
            except TrainingFault as fault:
                self.log(str(fault))  # the exception that ends training is reported by its handler

    def save(self, state: dict[str, Any]) -> None:
        """Start to save a checkpoint, after the previous one has been written."""
        self.wait()
        self.iteration = state["iteration"]
        snapshot = self.copy.take(take_snapshot(self.config, state, self.buffer, self.optimizer))
        # A daemon thread, so that the interpreter's exit on an interrupt does not wait for it.
        self.writing = threading.Thread(target=self._run, args=(snapshot,), daemon=True)
        self.writing.start()

    def check(self) -> None:
        """Log the background checkpoint if it has been completed since the last check."""
        if self.writing is None:
            return
        status = [int(self.writing.is_alive()), int(self.failure is not None)]
        running, failed = host_max(status, self.buffer.mesh.world)
        if failed or not running:
            self.wait()

    def wait(self) -> None:
        """Wait until the background checkpoint has been written, and log it.

        Raises:
            BaseException: `failure`.
        """
        if self.writing is None:
            return
        self.writing.join()
        self.writing = None
        if self.failure is not None:
            raise self.failure
        self.log_saved()

    def _run(self, snapshot: Snapshot) -> None:
        try:
            self.write(snapshot, self.world)
        except BaseException as error:
            self.failure = error


class HostCopy:
    """Host memory for the tensors of a snapshot, allocated once and reused by every save."""

    def __init__(self, snapshot: Snapshot, device: torch.device) -> None:
        """Allocate memory for snapshots like this one, whose tensors are on `device`."""
        self.device = device

        def like(x: Tensor) -> Tensor:
            return host_zeros(x.numel(), x.dtype, x.device).view(x.shape)

        self.tensors = {
            kind: {prefix: [like(tensor) for tensor in parts] for prefix, parts in group.items()}
            for kind, group in snapshot.tensors.items()
        }

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Copy a snapshot; the copy is valid until the next call."""
        for kind, group in snapshot.tensors.items():
            for prefix, parts in group.items():
                for copy, tensor in zip(self.tensors[kind][prefix], parts, strict=True):
                    copy.copy_(tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Snapshot(snapshot.state, self.tensors)
