"""Host memory that a GPU copies from and to while it computes, and the order of these copies."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the work of a device."""

    def wait(self) -> None:
        """Let the current stream continue after this point."""


class Passed:
    """A point that has been passed."""

    def wait(self) -> None:
        """Continue."""


PASSED = Passed()


def has_streams(device: torch.device) -> bool:
    """True if the work of a device is ordered by streams and events."""
    return device.type == "cuda"


def point_of(device: torch.device) -> Event:
    """The end of what the current stream has been given."""
    return torch.cuda.current_stream(device).record_event() if has_streams(device) else PASSED


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device. The host does not wait for a GPU, as it would with pageable memory."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class CopyQueue:
    """Copies between host and device, which run in order beside the device's computation.

    On a GPU they are on a stream of their own; a CPU copies at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if has_streams(device) else None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Iterable[Event]) -> Event:
        """Copy from the second to the first tensor of each pair.

        Whoever frees or changes a tensor of the pairs must wait for the result first.

        Args:
            after: points that the copies begin after.

        Returns:
            The end of these copies.
        """
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return PASSED
        with torch.cuda.stream(self.stream):
            for event in after:
                event.wait()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def synchronize(self) -> None:
        """Make the host wait for all copies."""
        if self.stream is not None:
            self.stream.synchronize()


def host_zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [size] in host memory, pinned if `device` is a GPU, with its pages touched."""
    memory = torch.ops.megatron.host_zeros(size, dtype)
    if device.type == "cuda" and memory.nbytes:
        # torch's own pinned memory is rounded up to a power of two.
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        end = weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr())
        end.atexit = False
    return memory


# An operation of its own, so that a dry run tells host memory from the device's.
torch.library.define("megatron::host_zeros", "(SymInt size, ScalarType dtype) -> Tensor")
torch.library.register_fake("megatron::host_zeros", lambda size, dtype: torch.zeros(size, dtype=dtype))


@torch.library.impl("megatron::host_zeros", "CompositeExplicitAutograd")
def _host_zeros(size: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(size, dtype=dtype)
