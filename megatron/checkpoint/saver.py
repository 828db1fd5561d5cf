"""Saving while training waits, or in the background while it goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.save import Snapshot, take_snapshot, write_checkpoint
from megatron.flags import TrainingFault
from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import all_reduce_max
from megatron.parallel.mesh import Axis, world_apart


class Saver:
    """Saves the checkpoints of a run, one at a time. Every process must take part in every method.

    Used in a `with` block. With --async-save a thread writes from a copy in the host's memory; leaving the block waits
    for it, unless an interrupt leaves it, the request to end at once.

    Raises, as every method:
        TrainingFault: a checkpoint cannot be written. Those before it are whole.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        buffer: ParamBuffer,
        optimizer: Optimizer,
        *,
        tokenizer_files: dict[str, bytes],
        say: Callable[[str], None],
    ) -> None:
        """`tokenizer_files` is the content of the tokenizer's files, by name; `say` tells people."""
        self.config, self.buffer, self.optimizer = config, buffer, optimizer
        self.tokenizer_files, self.say = tokenizer_files, say
        self.writing: threading.Thread | None = None
        self.iteration = (
            0  # of the checkpoint last written, or that is being written; at first the one begun from
        )
        self.failure: BaseException | None = None  # that ended the thread

    def __enter__(self) -> Saver:
        if self.config.async_save:
            # Memory is taken, and found to be too little, before training rather than at the first save.
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
                self.say(str(fault))  # and what has ended training is told where it is caught

    def save(self, state: dict[str, Any]) -> None:
        """Save a checkpoint of `state["iteration"]`; in the background, once the last one is written."""
        self.wait()
        self.iteration = state["iteration"]
        snapshot = take_snapshot(self.config, state, self.buffer, self.optimizer)
        if not self.config.async_save:
            self._write(snapshot, self.buffer.mesh.world)
            self._tell()
            return
        # A daemon, so that the interpreter does not wait for it where nobody wants to.
        self.writing = threading.Thread(target=self._run, args=(self.copy.take(snapshot),), daemon=True)
        self.writing.start()

    def check(self) -> None:
        """Tell if the checkpoint in the background has been written since the last check."""
        if self.writing is None:
            return
        here = torch.tensor([self.writing.is_alive(), self.failure is not None], dtype=torch.int32)
        running, failed = all_reduce_max(here, self.buffer.mesh.world).tolist()
        if failed or not running:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint in the background is written, if there is one."""
        if self.writing is None:
            return
        self.writing.join()
        self.writing = None
        if self.failure is not None:
            raise self.failure
        self._tell()

    def _tell(self) -> None:
        self.say(f"saved checkpoint at iteration {self.iteration} to {self.config.save}")

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
                f"{error}; the checkpoints before it are whole"
            ) from None


class HostCopy:
    """Memory of the host for the tensors of a snapshot, taken once and filled by each save anew."""

    def __init__(self, snapshot: Snapshot, device: torch.device) -> None:
        """Takes memory for snapshots like this one, whose tensors are on `device`."""
        self.device = device
        self.tensors = {
            kind: {prefix: [_host_memory(tensor) for tensor in mine] for prefix, mine in group.items()}
            for kind, group in snapshot.tensors.items()
        }

    def take(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with copies of its tensors, which last until the next is taken."""
        for kind, group in snapshot.tensors.items():
            for prefix, mine in group.items():
                for ours, tensor in zip(self.tensors[kind][prefix], mine, strict=True):
                    ours.copy_(tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Snapshot(snapshot.state, self.tensors)


def _host_memory(tensor: Tensor) -> Tensor:
    """Memory for a copy of a tensor. It is written to, for until then it is only promised, and filling it slow."""
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return memory.zero_()
