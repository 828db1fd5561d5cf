"""Save checkpoints, synchronously or in a background thread (--async-save)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.save import Snapshot, take_snapshot, write_checkpoint
from megatron.errors import TrainingFault
from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import all_reduce_max
from megatron.parallel.mesh import Axis, world_apart


class Saver:
    """Saves the checkpoints of a run, one at a time. A context manager; every method is collective.

    With --async-save a thread writes from a copy in host memory. Leaving the `with` block waits for that thread, unless
    KeyboardInterrupt or SystemExit leaves it.

    Every method raises `TrainingFault` if a checkpoint cannot be written. Earlier checkpoints remain complete.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        buffer: ParamBuffer,
        optimizer: Optimizer,
        *,
        tokenizer_files: dict[str, bytes],
        log: Callable[[str], None],
        iteration: int = 0,
    ) -> None:
        """
        Args:
            tokenizer_files: content of the tokenizer's files, by name.
            log: receives a line for each checkpoint.
            iteration: that of the checkpoint in --save that was loaded.
        """
        self.config, self.buffer, self.optimizer = config, buffer, optimizer
        self.tokenizer_files, self.log = tokenizer_files, log
        self.writing: threading.Thread | None = None
        # Iteration of the newest checkpoint, also while it is being written.
        self.iteration = iteration
        self.failure: BaseException | None = None  # raised in the thread

    def __enter__(self) -> Saver:
        if self.config.async_save:
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
        """Save a checkpoint, after the previous one has been written; `state` is the content of state.json."""
        self.wait()
        self.iteration = state["iteration"]
        snapshot = take_snapshot(self.config, state, self.buffer, self.optimizer)
        if not self.config.async_save:
            self._write(snapshot, self.buffer.mesh.world)
            self._log_saved()
            return
        # A daemon thread, so that the interpreter's exit on an interrupt does not wait for it.
        self.writing = threading.Thread(target=self._run, args=(self.copy.take(snapshot),), daemon=True)
        self.writing.start()

    def check(self) -> None:
        """Log the background checkpoint if it has been completed since the last check."""
        if self.writing is None:
            return
        status = torch.tensor([self.writing.is_alive(), self.failure is not None], dtype=torch.int32)
        running, failed = all_reduce_max(status, self.buffer.mesh.world).tolist()
        if failed or not running:
            self.wait()

    def wait(self) -> None:
        """Wait for the background checkpoint, if there is one."""
        if self.writing is None:
            return
        self.writing.join()
        self.writing = None
        if self.failure is not None:
            raise self.failure
        self._log_saved()

    def _log_saved(self) -> None:
        self.log(f"saved checkpoint at iteration {self.iteration} to {self.config.save}")

    def _run(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot, self.world)
        except BaseException as error:
            self.failure = error

    def _write(self, snapshot: Snapshot, world: Axis) -> None:
        try:
            write_checkpoint(self.config, snapshot, self.buffer, world, self.tokenizer_files)
        except OSError as error:
            raise TrainingFault(
                f"--save: the checkpoint of iteration {self.iteration} cannot be written to {self.config.save}: "
                f"{error}; earlier checkpoints are complete"
            ) from None


class HostCopy:
    """Host memory for the tensors of a snapshot, allocated once and reused by every save."""

    def __init__(self, snapshot: Snapshot, device: torch.device) -> None:
        """Allocate memory for snapshots like this one, whose tensors are on `device`."""
        self.device = device
        self.tensors = {
            kind: {prefix: [_host_memory(tensor) for tensor in parts] for prefix, parts in group.items()}
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


def _host_memory(tensor: Tensor) -> Tensor:
    """Allocate host memory for a copy of a tensor, and touch its pages so that the first copy is not slow."""
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return memory.zero_()
