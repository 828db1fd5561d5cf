"""What a process allocates, communicates and computes, counted operation by operation.

It makes no difference to the counts whether tensors are real or have shapes alone.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megatron.parallel.mesh import Activity


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Calls of a communication, and the bytes of the tensors that are summed, gathered, sent or received.

    Of an all-gather these are all parts, of a reduce-scatter what every process brings. What goes over the wires
    depends on the algorithm: in a ring of n each process sends (n - 1) / n of it, in an all-reduce twice that.
    """

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls - other.calls, self.bytes - other.bytes)


class Counter(TorchDispatchMode):
    """Counts within a `with` block.

    Memory is that of storages, from the operation that gives a tensor in one until the last such tensor is gone. What
    an operation takes for itself while it runs is not known, nor is what an allocator rounds up.

    Attributes:
        live: bytes of storages that exist, of those made within the block.
        peak: the most of `live` up to now.
        traffic: by kind of communication and name of the axis.
        flops: floating-point operations of matrix products and attention, by the formulas of torch.utils.flop_counter:
            attention as the whole square, and in backward with the scores that it computes again.
    """

    def __init__(self, activity: Activity) -> None:
        """`activity` is that of the process's mesh, where communication is noted."""
        super().__init__()
        self.activity = activity
        self.live = self.peak = self.flops = 0
        self.traffic: dict[tuple[str, str], Traffic] = {}
        self.storages: dict[int, weakref.ref] = {}
        self.holding = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:  # which fake tensors ask for all the time
            return out
        if func.namespace == "c10d":
            self._communicate(args)
        formula = FLOPS.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        if self.holding:
            self._hold(out)
        return out

    def fused(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function as if it were compiled to one operation: what lies between takes no memory."""
        self.holding = False
        try:
            out = function(*arguments)
        finally:
            self.holding = True
        self._hold(out)
        return out

    def _communicate(self, args: tuple) -> None:
        kind, axis = self.activity.communication
        size = max(x.numel() * x.element_size() for x in tensors_of(args))
        key = kind, axis.name
        self.traffic[key] = self.traffic.get(key, Traffic()) + Traffic(1, size)

    def _hold(self, out: Any) -> None:
        for tensor in tensors_of((out,)):
            if tensor.is_mkldnn:  # a weight in an order of oneDNN's own, which one product takes for itself
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.storages:
                continue
            size = storage.nbytes()
            self.storages[key] = weakref.ref(storage, lambda _, key=key, size=size: self._release(key, size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def _release(self, key: int, size: int) -> None:
        del self.storages[key]
        self.live -= size


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values, and in lists and tuples among them."""
    found = []
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


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q.shape, _for_heads(k, q), _for_heads(v, q))


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, _for_heads(k, q), _for_heads(v, q))


def _for_heads(x: Tensor, q: Tensor) -> tuple[int, ...]:
    """The shape of keys or values repeated for each head of `q`, as torch's formulas before 2.13 want it."""
    return (*q.shape[:2], *x.shape[2:])


aten = torch.ops.aten
# torch's formulas, and others for groups of heads, a CPU's operations, a product that is given another dtype, and one
# that is added in place.
FLOPS = flop_registry | {
    aten.addmm: _addmm,
    aten.addmm_: _addmm,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
if torch.backends.mkldnn.is_available():
    FLOPS[torch.ops.mkldnn._linear_pointwise] = _linear
