"""Count what a process allocates, communicates and computes, operation by operation.

The counts are the same for real and for fake tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import megatron.ops.host_memory
import megatron.ops.linear  # noqa: F401 (registers an operation)
from megatron.parallel.mesh import Heartbeat


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Calls of a communication, and bytes of the whole tensors that are reduced, gathered, sent or received.

    The bytes are those of an all-gather's output and of a reduce-scatter's input. Bytes on the wire depend on the
    algorithm: in a ring of n ranks each sends (n - 1) / n of these, in an all-reduce twice as many.
    """

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls - other.calls, self.bytes - other.bytes)


class Counter(TorchDispatchMode):
    """Count within a `with` block.

    Memory is counted by storage, from the operation that returns a tensor in it until the last such tensor is freed.
    Workspaces of operations and rounding by the allocator are not counted.

    Attributes:
        live: bytes of the existing storages that were made within the block.
        peak: maximum of `live` so far.
        host_live, host_peak: the same of host memory for what is copied from and to a device (`host_memory.py`).
        traffic: by kind of communication and name of the axis; ("copy", "to device") and ("copy", "to host") are copies
            between the two memories.
        flops: floating-point operations of matrix products and attention, by the formulas of torch.utils.flop_counter:
            attention without its causal mask, its backward with recomputed scores.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        """Take the kind and axis of communication from `heartbeat`, that of the process's mesh."""
        super().__init__()
        self.heartbeat = heartbeat
        self.live = self.peak = self.flops = 0
        self.host_live = self.host_peak = 0
        self.on_host: dict[int, tuple[weakref.ref, int]] = {}
        self.traffic: dict[tuple[str, str], Traffic] = {}
        self.storages: dict[int, tuple[weakref.ref, int]] = {}  # and their bytes
        self.holding = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.ops.prim.device.default
        ):  # fake tensors call it all the time, and know it without the modes
            return args[0].device
        if func is torch.ops.inductor.resize_storage_bytes_.default:
            self._resize(*args)
        out = func(*args, **kwargs)
        if func is torch.ops.megatron.host_zeros.default:
            self._hold_on_host(out)
            return out
        if func is torch.ops.aten.copy_.default and self.on_host:
            self._copy(*args[:2])
        if func.namespace == "c10d":
            self._communicate(args)
        formula = FLOPS.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        # A library's allocations during a communication are its workspace.
        if self.holding and self.heartbeat.communication is None:
            self._hold(out)
        return out

    def fused(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function as if it were compiled to one operation: intermediate tensors take no memory."""
        self.holding = False
        try:
            out = function(*arguments)
        finally:
            self.holding = True
        self._hold(out)
        return out

    def _communicate(self, args: tuple) -> None:
        assert self.heartbeat.communication is not None
        kind, axis = self.heartbeat.communication
        size = max(x.numel() * x.element_size() for x in tensors_of(args))
        key = kind, axis.name
        self.traffic[key] = self.traffic.get(key, Traffic()) + Traffic(1, size)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """Count a copy between host and device."""
        ends = [x.untyped_storage()._cdata in self.on_host for x in (target, source)]
        if ends[0] != ends[1]:
            key = "copy", "to host" if ends[0] else "to device"
            size = target.numel() * target.element_size()
            self.traffic[key] = self.traffic.get(key, Traffic()) + Traffic(1, size)

    def _hold_on_host(self, out: Tensor) -> None:
        storage = out.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.on_host[key] = weakref.ref(storage, functools.partial(self._release_on_host, key)), size
        self.host_live += size
        self.host_peak = max(self.host_peak, self.host_live)

    def _release_on_host(self, key: int, _: weakref.ref) -> None:
        self.host_live -= self.on_host.pop(key)[1]

    def _hold(self, out: Any) -> None:
        for tensor in tensors_of((out,)):
            if tensor.is_mkldnn:  # a weight reordered by oneDNN, internal to one product
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.storages or key in self.on_host:
                continue
            self.storages[key] = weakref.ref(storage, functools.partial(self._release, key)), 0
            self._set_size(key, storage.nbytes())

    def _resize(self, x: Tensor, size: int) -> None:
        key = x.untyped_storage()._cdata
        if key in self.storages:
            self._set_size(key, size)

    def _set_size(self, key: int, size: int) -> None:
        ref, old = self.storages[key]
        self.storages[key] = ref, size
        self.live += size - old
        self.peak = max(self.peak, self.live)

    def _release(self, key: int, _: weakref.ref) -> None:
        self.live -= self.storages.pop(key)[1]


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, nested lists and tuples included."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found


def _linear(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


def _addmm(total: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.shape[1]


def _grouped_mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q.shape, _for_heads(k, q), _for_heads(v, q))


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, _for_heads(k, q), _for_heads(v, q))


def _for_heads(x: Tensor, q: Tensor) -> tuple[int, ...]:
    """Return the shape of keys or values repeated for each head of `q`, as the formulas of torch 2.11 need."""
    return (*q.shape[:2], *x.shape[2:])


aten = torch.ops.aten
# torch's formulas, and those for grouped-query attention, CPU operations, products with an output dtype or a sum that
# they are added to.
FLOPS = flop_registry | {
    aten.addmm: _addmm,
    aten.addmm_: _addmm,
    torch.ops.megatron.accumulate_wgrad: _addmm,
    aten._grouped_mm: _grouped_mm,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
if torch.backends.mkldnn.is_available():
    FLOPS[torch.ops.mkldnn._linear_pointwise] = _linear
