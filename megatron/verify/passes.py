"""Capture the passes of a step: the outputs of modules, their gradients, losses and random masks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.data.batch import Batch
from megatron.data.zigzag import Zigzag
from megatron.parallel.collectives import all_gather, all_reduce_sum
from megatron.parallel.mesh import Mesh
from megatron.parallel.parameters import named_parameters
from megatron.parallel.random import DropoutKey
from megatron.verify.format import CaptureWriter, Place, Record


class PassCapture:
    """Writes records of the forward and backward passes of one rank.

    Attributes:
        step: the step that runs.
        samples: index in the run of the first sample of each microbatch to capture, by the microbatch's id().
        loss_scale: what activation gradients are divided by.
        microbatch: first sample of the microbatch that is in forward; None outside of forward.
    """

    def __init__(self, writer: CaptureWriter, mesh: Mesh, loss_names: tuple[str, ...]) -> None:
        self.writer, self.mesh, self.loss_names = writer, mesh, loss_names
        self.step, self.loss_scale = 0, 1.0
        self.samples: dict[int, int] = {}
        self.microbatch: int | None = None
        self.zigzag = Zigzag(0, 1)  # of the microbatch that is in forward
        self.order = 0
        # Counted by microbatch, since its passes through several chunks may call the same module.
        self.calls: dict[tuple[int | None, str, str], int] = {}
        self.producers: dict[int, tuple[str, Tensor]] = {}
        self.readers: dict[str, set[str]] = {}
        self.running: list[str] = []

    def forward(
        self, inner: Any, module: nn.Module, batch: Batch, x: Tensor | None, dropout_key: DropoutKey
    ) -> Tensor:
        """Run the task's forward on a microbatch, and capture it if `samples` names it."""
        if id(batch) not in self.samples:
            return inner(module, batch, x, dropout_key)
        self.microbatch = self.samples[id(batch)]
        size = self.mesh.cp.size
        self.zigzag = Zigzag.of(batch.seq_length * size, size, documents=batch.document_ids is not None)
        self.order = 0
        try:
            with MaskRecorder(self):
                out = inner(module, batch, x, dropout_key)
            if out.ndim == 1:
                sums = all_reduce_sum(out.detach().clone(), self.mesh.cp)
                for name, value in zip(self.loss_names, sums, strict=True):
                    self._add("loss", name, value.float())
        finally:
            self.microbatch = None
            self.producers.clear()
        return out

    def hooked(self, chunk: nn.Module) -> Iterator[Any]:
        """Hook all modules of a chunk of the model. Yields the handles."""
        for name, module in chunk.named_modules():
            yield module.register_forward_pre_hook(functools.partial(self._before_module, name))
            yield module.register_forward_hook(functools.partial(self._after_module, name))

    def _before_module(self, name: str, module: nn.Module, inputs: tuple) -> None:
        if self.microbatch is None:
            return
        self.running.append(name)
        if inputs and isinstance(inputs[0], Tensor) and id(inputs[0]) in self.producers:
            self.readers.setdefault(self.producers[id(inputs[0])][0], set()).add(name)

    def _after_module(self, name: str, module: nn.Module, inputs: tuple, out: Any) -> None:
        if self.microbatch is None:
            return
        self.running.pop()
        if not isinstance(out, Tensor) or not out.is_floating_point() or _has_dispatched_rows(module):
            return
        # [b, s] are losses at the positions of [s, b, h]; [b, h] may by chance be as wide as a sequence.
        has_positions = out.ndim != 2 or (
            bool(inputs) and isinstance(inputs[0], Tensor) and inputs[0].ndim == 3
        )
        dim = self._sequence_dim(out) if has_positions else None
        if dim is None and self.mesh.cp.size > 1:
            return  # of BERT's heads, which each rank applies to its own predictions
        whole = self._gathered(out, dim)
        place = self._place(module, inputs, whole)
        index = self._add("activation", name, whole, place=place)
        self.producers[id(out)] = name, out  # held, so that no other tensor gets its id
        if out.requires_grad and not _has_partial_output_gradient(module):
            partial = place is None and _has_partial_weight_gradient(module)
            record = self._record("activation gradient", name, index, place, partial=partial)
            out.register_hook(functools.partial(self._add_gradient, record, dim))

    def _add_gradient(self, record: Record, dim: int | None, grad: Tensor) -> None:
        readers = tuple(sorted(self.readers.get(record.name, ())))
        values = self._gathered(grad, dim).float() / self.loss_scale
        self.writer.add(dataclasses.replace(record, read_by=readers), values)

    def add_mask(self, mask: Tensor) -> None:
        """Add a mask of dropout that the current module drew."""
        if self.microbatch is not None:
            self._add("mask", self.running[-1] if self.running else "", mask != 0)

    def _add(self, kind: str, name: str, values: Tensor, *, place: Place | None = None) -> int:
        """Add a record of the current microbatch. Returns its index among those of the module."""
        key = self.microbatch, kind, name
        index = self.calls.get(key, 0)
        self.calls[key] = index + 1
        self.order += 1
        self.writer.add(self._record(kind, name, index, place), values)
        return index

    def _record(
        self, kind: str, name: str, index: int, place: Place | None, *, partial: bool = False
    ) -> Record:
        return Record(
            kind=kind,
            name=name,
            step=self.step,
            sample=self.microbatch,
            index=index,
            order=self.order,
            place=place,
            partial=partial,
        )

    def _sequence_dim(self, out: Tensor) -> int | None:
        """The dimension of an activation that context parallelism divides: [s, b, h], [b, n, s, d] or [b, s]."""
        dim = {2: 1, 3: 0, 4: 2}.get(out.ndim)
        local, tp = self.zigzag.length // self.mesh.cp.size, self.mesh.tp.size
        if self.mesh.cp.size == 1 or dim is None:
            return None
        return dim if out.shape[dim] == local or (out.ndim == 3 and out.shape[0] * tp == local) else None

    def _gathered(self, x: Tensor, dim: int | None) -> Tensor:
        """An activation with the positions of all context-parallel ranks, in order unless `tp` divides them too."""
        if dim is None:
            return x
        cp, moved = self.mesh.cp, x.detach().movedim(dim, 0)
        parts = all_gather(moved.contiguous().unsqueeze(0), cp)
        is_whole = x.shape[dim] * cp.size == self.zigzag.length
        return (self.zigzag.restore(parts) if is_whole else parts.flatten(0, 1)).movedim(0, dim)

    def _place(self, module: nn.Module, inputs: tuple, out: Tensor) -> Place | None:
        """Place of a module's output in the output of the whole module, as far as its weight or the batch tells it."""
        tp, shape = self.mesh.tp, tuple(out.shape)
        # The rows of an embedding's weight are no part of its output, whose width may by chance be their number.
        is_lookup = bool(inputs) and isinstance(inputs[0], Tensor) and not inputs[0].is_floating_point()
        # With labels the output layer returns losses, whose number may by chance be that of its rows.
        is_loss = out.ndim == 2 and bool(inputs) and isinstance(inputs[0], Tensor) and inputs[0].ndim == 3
        for _, p in () if is_lookup or is_loss else named_parameters(module, recurse=False):
            spec = p.shard_spec
            # A vector scales or shifts its input, of whose dimensions another may be split.
            is_matrix = len(spec.shape) == 2
            if (
                is_matrix
                and spec.dim == 0
                and spec.local_shape[0] < spec.shape[0]
                and shape[-1] == spec.local_shape[0]
            ):
                whole = (*shape[:-1], spec.shape[0])
                return Place(shape=whole, dim=out.ndim - 1, ranges=spec.ranges, local_shape=shape)
        length = self.zigzag.length
        if tp.size > 1 and out.ndim == 3 and shape[0] * tp.size == length:
            ranges = tuple(
                part
                for rank in range(self.mesh.cp.size)
                for part in cut(self.zigzag.ranges(rank), tp.rank, tp.size)
            )
            return Place(shape=(length, *shape[1:]), dim=0, ranges=ranges, local_shape=shape)
        return None


def cut(ranges: list[tuple[int, int]], rank: int, size: int) -> Iterator[tuple[int, int]]:
    """The part of a rank of positions that `size` ranks divide, as ranges."""
    total = sum(end - begin for begin, end in ranges) // size
    first, last, start = rank * total, (rank + 1) * total, 0
    for begin, end in ranges:
        a, b = max(first - start, 0), min(last - start, end - begin)
        start += end - begin
        if a < b:
            yield begin + a, begin + b


def _has_dispatched_rows(module: nn.Module) -> bool:
    """True if the rows of the module's output are in an order that depends on the layout, as those of experts are."""
    return any(p.shard_spec.expert_parallel for _, p in named_parameters(module, recurse=False))


def _has_partial_output_gradient(module: nn.Module) -> bool:
    """True if ranks share rows of the module's split weight, and each has its part of the gradient of their output."""
    specs = [p.shard_spec for _, p in named_parameters(module, recurse=False)]
    return any(spec.partial and spec.local_shape[0] < spec.shape[0] for spec in specs)


def _has_partial_weight_gradient(module: nn.Module) -> bool:
    """True if ranks sum the gradient of the module's weight, so that of a whole output each has its part too."""
    return any(p.shard_spec.partial for _, p in named_parameters(module, recurse=False))


class MaskRecorder(TorchDispatchMode):
    """Records the random masks that are drawn in its context."""

    def __init__(self, capture: PassCapture) -> None:
        super().__init__()
        self.capture = capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli.p):
            self.capture.add_mask(out)
        elif func is torch.ops.aten.native_dropout.default:
            self.capture.add_mask(out[1])
        elif func is torch.ops.aten.randint.low:  # words of attention's masks, by bit
            self.capture.add_mask(out.unsqueeze(-1) >> torch.arange(32) & 1)
        return out
