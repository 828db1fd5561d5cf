"""Sharded gradients and parameters, unit by unit: ZeRO-2 and ZeRO-3 (arXiv 1910.02054; 2304.11277 for the order).

Parameters are gathered before a unit's forward and freed after it; a layer's are gathered again before its backward.
Gradients get memory before the unit's backward, and are reduced when they are complete. Hooks of the modules do this,
so that the model and recomputation know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron.optim.grad_reducer import GradReducer
from megatron.optim.param_gather import ParamGather
from megatron.optim.units import units_of


class ShardedUnits:
    """The units of one model chunk, which has the whole of a unit's parameters and gradients only while it is used."""

    def __init__(
        self,
        model: nn.Module,
        bucket_of: Mapping[Tensor, int],
        gather: ParamGather,
        reducer: GradReducer,
        *,
        prefetch: bool,
    ) -> None:
        """Register the hooks.

        Args:
            bucket_of: index of the bucket of each parameter.
            prefetch: start to gather the next unit's parameters when a unit's computation begins.
        """
        self.units, self.gather, self.reducer, self.prefetch = units_of(model), gather, reducer, prefetch
        self.buckets = [
            sorted({bucket_of[p] for module in unit.modules for p in module.parameters()})
            for unit in self.units
        ]
        self.in_backward = False
        for i, unit in enumerate(self.units):
            for module in unit.modules:
                # A unit's later modules may come long after its first, as an output layer after a shared embedding.
                ahead = i + 1 if module is unit.modules[0] else None
                module.register_forward_pre_hook(self._before_forward(i, ahead))
                if unit.kind != "ends":
                    module.register_forward_hook(self._after_forward(i))

    def _before_forward(self, i: int, ahead: int | None) -> Callable[..., None]:
        def run(*_: object) -> None:
            self._need_params(i, None if self.in_backward else ahead)
            # The loss computes gradients of the output layer in forward.
            if self.units[i].kind == "ends" and torch.is_grad_enabled() and not self.in_backward:
                self._need_grads(i)

        return run

    def _after_forward(self, i: int) -> Callable[..., None]:
        def before_backward(_: Tensor) -> None:
            if self.units[i].kind == "layer":
                self._need_params(i, i - 1 if i > 0 and self.units[i - 1].kind == "layer" else None)
            self.reducer.prepare(self.buckets[i])

        def run(module: nn.Module, inputs: object, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(before_backward)
            if not self.in_backward:  # else the layer is recomputed, and its backward follows
                for index in self.buckets[i]:
                    self.gather.free(index)

        return run

    def _need_params(self, i: int, ahead: int | None) -> None:
        """Gather the parameters of unit `i`, and start on those of unit `ahead`, if there is one."""
        for index in self.buckets[i]:
            self.gather.start_whole(index)
        if self.prefetch and ahead is not None and ahead < len(self.units):
            for index in self.buckets[ahead]:
                self.gather.start_whole(index)
        for index in self.buckets[i]:
            self.gather.wait(index)

    def _need_grads(self, i: int) -> None:
        reducer = self.reducer
        if not all(reducer.memory.has(index) and index not in reducer.reducing for index in self.buckets[i]):
            reducer.prepare(self.buckets[i])

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a backward pass through the chunk."""
        self.in_backward = True
        layers, ends = ([i for i, u in enumerate(self.units) if u.kind == kind] for kind in ("layer", "ends"))
        for (
            i
        ) in ends:  # the backward of an earlier microbatch may have freed them after forward, in a pipeline
            self._need_params(i, None)
            self._need_grads(i)
        if self.prefetch and layers:
            for index in self.buckets[layers[-1]]:
                self.gather.start_whole(index)
        try:
            yield
        finally:
            self.in_backward = False
        indices = [index for buckets in self.buckets for index in buckets]
        self.reducer.end_backward(indices)
        for index in indices:
            self.gather.free(index)
