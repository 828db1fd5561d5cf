"""Activations of layers in host memory between forward and backward (--cpu-offload-activations).

What a layer saves for backward is copied to the host while later layers compute, and its memory is free after that.
Backward brings it back in the opposite order, while later layers' backward computes. Copies are on streams of their
own. vDNN (arXiv 1602.08124) did this for convolutions.

If all layers are offloaded, a copy has the time of the next layer. If only N of L are, it has that of L/N layers: the
first N leave one after the other until the chunk ends, and never are more than L - N + 2 layers on the device.

Hooks of autograd do it, so that the model knows nothing of it, compiled or not. Whole storages are copied, once for all
views that a layer saves, and the views come back with the same strides.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.model.transformer import LayerInputs, Transformer, TransformerLayer
from megatron.ops.host_memory import PASSED, CopyQueue, Event, host_zeros, point_of
from megatron.performance.config import OffloadConfig
from megatron.training.config import RunConfig
from megatron.training.stage import StageModel

# Storages of fewer bytes stay on the device: masks of small batches, statistics of norms.
MIN_BYTES = 1 << 20
# Memory of the host over what is needed of it: for one storage, and for all of them.
SPARE = 1.25


def offload_activations(config: RunConfig, model: StageModel, device: torch.device) -> None:
    """Replace the forward passes of the layers of a model whose activations are to be offloaded."""
    offload = config.plugin(OffloadConfig)
    if not offload.cpu_offload_activations:
        return
    copies = HostCopies(device)
    for chunk, module in zip(model.chunks, model.modules, strict=True):
        for transformer in (m for m in module.modules() if isinstance(m, Transformer)):
            layers = [layer for layer in transformer.layers.values() if isinstance(layer, TransformerLayer)]
            OffloadedLayers(layers, offload.num_layers(len(layers), last=chunk.last), copies)


@dataclasses.dataclass(eq=False)
class Activation:
    """A storage that a layer saves.

    Attributes:
        flat: [elements] all of it, on the device; None while it is on the host only.
        elements: number of elements.
        on_host: [elements or more] memory of the host, which begins with its copy.
    """

    flat: Tensor | None
    elements: int
    on_host: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor that autograd saves: a view of an activation."""

    activation: Activation
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclasses.dataclass(eq=False)
class Pass:
    """The activations of one forward pass of a layer.

    Attributes:
        comes_with: passes of earlier layers that start to come back when the backward of this one begins.
        activations: by storage; none if they stay on the device, or after backward has begun to use them.
        is_leaving: the copies to the host have started, and the tensors on the device still exist.
        is_coming: the tensors exist on the device again.
        ready: end of the last copies.
    """

    comes_with: tuple[Pass, ...] = ()
    activations: dict[int, Activation] = dataclasses.field(default_factory=dict)
    is_leaving: bool = False
    is_coming: bool = False
    ready: Event = PASSED


class HostMemory:
    """Memory of the host for copies of activations, which is reused.

    The sizes of activations may differ from step to step: a router chooses how many rows an expert has. So memory that
    is a little larger is taken too, and free memory is given up, so that all of it together is little more than the
    most that was in use at once.

    Attributes:
        free: by dtype and bytes, memory with the point after which it may be overwritten; sizes that came back last
            stand last.
        used, most_used, total: bytes in use, the most at once, and those that are free too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: dict[tuple[torch.dtype, int], list[tuple[Tensor, Event]]] = {}
        self.used = self.most_used = self.total = 0

    def take(self, like: Tensor, finish_copies: Callable[[], None]) -> tuple[Tensor, Event]:
        """Return memory for a copy of a tensor [n], and the point after which it may be overwritten.

        Args:
            finish_copies: waits for all copies from and to memory that is free.
        """
        key = like.dtype, like.nbytes
        if key not in self.free:
            larger = (
                k for k in self.free if k[0] == like.dtype and like.nbytes < k[1] <= SPARE * like.nbytes
            )
            key = min(larger, key=lambda k: k[1], default=key)
        if key in self.free:
            found, ready = self._pop(key)
        else:
            self._make_room(like.nbytes, finish_copies)
            found, ready = host_zeros(like.numel(), like.dtype, self.device), PASSED
            self.total += found.nbytes
        self.used += found.nbytes
        self.most_used = max(self.most_used, self.used)
        return found, ready

    def give_back(self, x: Tensor, ready: Event) -> None:
        """Take memory back that may be overwritten after a point."""
        key = x.dtype, x.nbytes
        self.used -= x.nbytes
        others = self.free.pop(key, [])
        others.append((x, ready))
        self.free[key] = others

    def _make_room(self, size: int, finish_copies: Callable[[], None]) -> None:
        """Give up free memory until `size` bytes more are at most SPARE times the most in use."""
        limit = SPARE * max(self.most_used, self.used + size)
        if self.free and self.total + size > limit:
            finish_copies()
        while self.free and self.total + size > limit:
            self.total -= self._pop(next(iter(self.free)))[0].nbytes

    def _pop(self, key: tuple[torch.dtype, int]) -> tuple[Tensor, Event]:
        found = self.free[key].pop()
        if not self.free[key]:
            del self.free[key]
        return found


class HostCopies:
    """Copies of activations to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_host, self.to_device = CopyQueue(device), CopyQueue(device)
        self.leaving: list[Pass] = []
        self.memory = HostMemory(device)

    def leave(self, done: Pass) -> None:
        """Start to copy the activations of a pass, which has just ended, to the host."""
        pairs, after = [], [point_of(self.device)]
        for activation in done.activations.values():
            assert activation.flat is not None
            activation.on_host, event = self.memory.take(activation.flat, self._finish)
            after.append(event)
            pairs.append((activation.on_host[: activation.elements], activation.flat))
        if pairs:
            done.ready = self.to_host.copy(pairs, after)
            done.is_leaving = True

    def come(self, wanted: Pass) -> None:
        """Start to copy the activations of a pass back, unless they are on the device."""
        if wanted.is_coming or not wanted.activations:
            return
        wanted.is_coming = True
        if wanted.is_leaving:  # still here
            wanted.is_leaving = False
        else:
            pairs = []
            for activation in wanted.activations.values():
                assert activation.on_host is not None
                copy = activation.on_host[: activation.elements]
                activation.flat = torch.empty_like(copy, device=self.device)
                pairs.append((activation.flat, copy))
            wanted.ready = self.to_device.copy(pairs, [point_of(self.device)])
        for activation in wanted.activations.values():
            x, activation.on_host = activation.on_host, None
            assert x is not None
            self.memory.give_back(x, wanted.ready)

    def wait(self, wanted: Pass) -> None:
        """Let the current stream wait until the activations of a pass are on the device."""
        self.come(wanted)
        if wanted.activations:
            wanted.ready.wait()
            wanted.activations = {}  # now the graph of autograd alone holds them, which frees each after its use

    def free_after_copy(self, left: Pass) -> None:
        """Let the current stream wait for the copies of a pass to the host, and free its memory on the device."""
        if left.is_leaving:
            left.ready.wait()
            left.is_leaving = False
            for activation in left.activations.values():
                activation.flat = None

    def _finish(self) -> None:
        self.to_host.synchronize()
        self.to_device.synchronize()


class OffloadedLayers:
    """The layers of one model chunk, of which the first ones' activations go to the host."""

    def __init__(self, layers: Sequence[TransformerLayer], num_offloaded: int, copies: HostCopies) -> None:
        """Replace the forward passes of `layers`."""
        self.layers, self.num_offloaded, self.copies = layers, num_offloaded, copies
        # By index of a layer, those whose memory is freed when its forward has ended.
        self.freed_after: dict[int, list[int]] = collections.defaultdict(list)
        for index in range(num_offloaded):
            self.freed_after[last_overlapped(index, num_offloaded, len(layers))].append(index)
        self.passes: list[Pass] = []
        for index, layer in enumerate(layers):
            layer.forward = self._forward(index, layer.forward)  # type: ignore[method-assign]

    def _forward(self, index: int, forward: Any) -> Any:
        def run(x: Tensor, inputs: LayerInputs) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(x, inputs)
            if index == 0:
                self.passes = []
            freed = tuple(self.passes[i] for i in self.freed_after[index])
            this = Pass(comes_with=freed)
            self.passes.append(this)
            if index < self.num_offloaded:
                out = self._run_offloaded(index, forward, this, x, inputs)
            else:
                out = forward(x, inputs)
            # Those of the last layer of another chunk, if it is offloaded.
            for left in (*self.copies.leaving, *freed):
                self.copies.free_after_copy(left)
            self.copies.leave(this)
            self.copies.leaving = [this] if index == len(self.layers) - 1 else []
            if out.requires_grad:
                out.register_hook(lambda _: self._begin_backward(this))
            return out

        return run

    def _run_offloaded(self, index: int, forward: Any, this: Pass, x: Tensor, inputs: LayerInputs) -> Tensor:
        kept = {storage_of(t) for t in kept_tensors(self.layers[index], inputs)}

        def pack(x: Tensor) -> Tensor | View:
            key = storage_of(x)
            if (
                key in kept
                or x.device.type != self.copies.device.type
                or x.untyped_storage().nbytes() < MIN_BYTES
            ):
                return x
            if key not in this.activations:
                elements = x.untyped_storage().nbytes() // x.element_size()
                this.activations[key] = Activation(x.detach().as_strided((elements,), (1,), 0), elements)
            return View(this.activations[key], x.dtype, x.shape, x.stride(), x.storage_offset())

        def unpack(saved: Tensor | View) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            self.copies.wait(this)
            flat = saved.activation.flat
            assert flat is not None
            return flat.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

        with saved_tensors_hooks(pack, unpack):
            return forward(x, inputs)

    def _begin_backward(self, this: Pass) -> None:
        self.copies.come(this)
        for earlier in reversed(this.comes_with):
            self.copies.come(earlier)


def last_overlapped(index: int, num_offloaded: int, num_layers: int) -> int:
    """Index of the last layer whose forward overlaps with the copies of layer `index` of the first `num_offloaded`."""
    return max(index + 1, -(-(index + 1) * num_layers // num_offloaded) - 1)


def storage_of(x: Tensor) -> int:
    """A key of a tensor's storage."""
    return x.untyped_storage()._cdata


def kept_tensors(layer: TransformerLayer, inputs: LayerInputs) -> Iterator[Tensor]:
    """Tensors that stay on the device: parameters with their gradients, and what other layers read too."""
    for p in layer.parameters():
        yield p
        yield from (
            x for x in (p.grad, getattr(p, "main_grad", None), getattr(p, "master", None)) if x is not None
        )
    yield from tensors_in(inputs)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in a value, its fields and elements."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for element in value:
            yield from tensors_in(element)
    elif hasattr(value, "as_tuple"):  # a mask of FlexAttention
        yield from tensors_in(value.as_tuple())
