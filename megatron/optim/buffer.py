"""Flat memory for the parameters, gradients and fp32 master weights of this rank's part of a model.

Every parameter is a view into one flat tensor, and every gradient a view into another. The memory is cut into buckets.
The gradients of a bucket are reduced together over the replicas (`grad_reducer.py`). With the distributed optimizer
(arXiv 1910.02054, stage 1) each replica owns a shard of every bucket: it alone gets the summed gradients of the shard
and holds its master weights and optimizer state, and the other replicas gather the updated weights from it
(`param_gather.py`). Gradients can be sharded in the same way (stage 2): `sharded_units.py`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.model.transformer import TransformerLayer
from megatron.optim.grad_reducer import GradReducer
from megatron.optim.layout import Bucket, FlatParam
from megatron.optim.memory import FlatMemory, shard_parts
from megatron.optim.param_gather import ParamGather
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.parameters import named_parameters, parameter_on
from megatron.parallel.phases import UNOBSERVED, Phases

if TYPE_CHECKING:
    from megatron.optim.sharded_units import ShardedUnits


class ParamBuffer:
    """Flat memory of the model chunks of this rank.

    Attributes:
        param_memory, grad_memory: memory of the parameters, in the dtype that the model computes in, and of the fp32
            gradients that backward accumulates.
        params, grads: [size] what exists of them all the time.
        masters: for each bucket, the fp32 master weights of the local shard; views of `params` if the model itself is
            fp32.
        reducer: reduces `grads` over the replicas.
        gather: gathers `params` after a step.
        units: by chunk, the units of sharded gradients; empty if none are sharded.
        local_elements, num_elements: parameters of this rank, and of the whole model without vocabulary padding.
    """

    def __init__(
        self,
        chunks: list[nn.Module],
        buckets: list[Bucket],
        mesh: Mesh,
        config: ParallelConfig,
        *,
        dtype: torch.dtype,
        phases: Phases = UNOBSERVED,
    ) -> None:
        """Move the parameters of `chunks` to flat memory. They have no values until `initialize`.

        Args:
            buckets: layout of the memory, which `lay_out` gives.
        """
        self.buckets, self.mesh, self.config = buckets, mesh, config
        device = mesh.device
        params, grads = (
            [getattr(b.group, name) for b in buckets] for name in ("shards_params", "shards_grads")
        )
        self.param_memory = FlatMemory(buckets, params, dtype=dtype, device=device)
        self.grad_memory = FlatMemory(buckets, grads, dtype=torch.float32, device=device)
        self.params, self.grads = self.param_memory.flat, self.grad_memory.flat
        if self.is_fp32:
            self.masters = self.param_memory.shards
        else:
            sizes = [bucket.shard[1] - bucket.shard[0] for bucket in buckets]
            allocate = [bucket.group.optimizer.allocate for bucket in buckets]
            self.masters = [f(n, torch.float32, device) for f, n in zip(allocate, sizes, strict=True)]
        self.local_elements = sum(param.end - param.start for param in self.flat_params)
        mine = collections.Counter[Axis]()
        for bucket in buckets:
            mine[bucket.group.model_axis] += sum(param.num_counted for param in bucket.flat_params)
        of_stage = [all_reduce_sum(torch.tensor(n, device=device), axis) for axis, n in mine.items()]
        self.num_elements = int(all_reduce_sum(torch.stack(of_stage).sum(), mesh.pp))
        self.reducer = GradReducer(self.grad_memory, buckets, mesh, config)
        self.gather = ParamGather(self.param_memory, buckets, phases)
        self.units: dict[int, ShardedUnits] = {}
        self._attach(chunks)

    @property
    def is_fp32(self) -> bool:
        """True if the parameters are their own master weights."""
        return self.params.dtype == torch.float32

    @property
    def flat_params(self) -> list[FlatParam]:
        """All parameters in the order of memory."""
        return [param for bucket in self.buckets for param in bucket.flat_params]

    def _attach(self, chunks: list[nn.Module]) -> None:
        """Replace parameters by views, and register the hooks that start reductions and wait for gathers."""
        flat_params = {(p.chunk, p.name): (p, i) for i, b in enumerate(self.buckets) for p in b.flat_params}
        needed: dict[nn.Module, set[int]] = collections.defaultdict(set)
        for chunk, model in enumerate(chunks):
            # A layer waits as a whole: hooks within it would be part of its compiled code.
            layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
            layer_of = {module: layer for layer in layers for module in layer.modules()}
            bucket_of: dict[Tensor, int] = {}
            for path, module in model.named_modules():
                for leaf, p in list(named_parameters(module, recurse=False)):
                    name = f"{path}.{leaf}" if path else leaf
                    flat_param, index = flat_params[chunk, p.tied or name]
                    # `data` has a version counter of its own. With gloo, another thread writes the gathered values of a
                    # bucket, at times between the forward and the backward of a module that needs another bucket; with
                    # one counter for all of the memory, autograd would take it for a change of that module's weights.
                    p = parameter_on(self.param_memory.view(flat_param).data, p)
                    self.gather.free(index)  # `data` of a fake tensor, in a dry run, has got memory
                    setattr(module, leaf, p)
                    p.main_grad = self.grad_memory.view(flat_param)
                    if self.is_fp32:
                        p.grad = p.main_grad
                    if (bucket := self.buckets[index]).shard == (bucket.start, bucket.end):
                        begin = flat_param.start - bucket.start
                        p.master = self.masters[index][begin : begin + p.numel()].view_as(p)
                    sharded = self.grad_memory.sharded[index]
                    if not self.is_fp32 or self.config.overlap_grad_reduce or sharded:
                        p.register_post_accumulate_grad_hook(self._on_grad(p.main_grad, chunk, index))
                    needed[layer_of.get(module, module)].add(index)
                    bucket_of[p] = index
            if any(self.grad_memory.sharded):
                from megatron.optim.sharded_units import ShardedUnits

                prefetch = self.config.overlap_param_gather
                self.units[chunk] = ShardedUnits(
                    model, bucket_of, self.gather, self.reducer, prefetch=prefetch
                )
        if self.config.overlap_param_gather:
            for module, indices in needed.items():
                module.register_forward_pre_hook(self._on_forward(sorted(indices)))

    def _on_grad(self, grad: Tensor, chunk: int, index: int) -> Callable[[Tensor], None]:
        def accumulate(p: Tensor) -> None:
            # Layers that accumulate into main_grad themselves leave no gradient, but autograd still calls this hook.
            if p.grad is not None and not self.is_fp32:
                grad.add_(p.grad)
                p.grad = None
            if self.reducer.on_grad(index, chunk):
                self.gather.free(index)

        return accumulate

    def _on_forward(self, needed: list[int]) -> Callable[..., None]:
        def wait(*_: object) -> None:
            for index in needed:
                self.gather.wait(index)

        return wait

    def backward(self, chunk: int) -> AbstractContextManager[None]:
        """Context of a backward pass through a model chunk."""
        return self.units[chunk].backward() if chunk in self.units else nullcontext()

    def sync_params(self) -> None:
        """Copy the master weights to the parameters of all replicas.

        With --overlap-param-gather it only starts to; modules wait before their next forward. Sharded parameters are
        gathered there.
        """
        for index, (shard, master) in enumerate(zip(self.param_memory.shards, self.masters, strict=True)):
            if not self.is_fp32 and not self.buckets[index].group.optimizer.on_host:
                shard.copy_(master)
            if self.param_memory.sharded[index]:
                self.gather.free(index)
            else:
                self.gather.start(index)
        if not self.config.overlap_param_gather:
            self.gather.finish()

    def initialize(self, seed: int) -> None:
        """Set the initial values, which depend only on seed, name and position in the whole model."""
        for bucket, master in zip(self.buckets, self.masters, strict=True):
            for param in bucket.flat_params:
                values = torch.empty(param.shard_spec.local_shape)
                param.init(values, param.shard_spec, seed, param.name)
                self.param_memory.write(param, values)
                if not self.is_fp32:
                    for part, begin in shard_parts(bucket, param, master):
                        part.copy_(values.view(-1)[begin : begin + part.numel()])

    def held_params(self) -> Iterator[tuple[FlatParam, Tensor, int]]:
        """Yield what `parts` does, of the parameters that exist between steps: whole ones if they are not sharded."""
        for index, bucket in enumerate(self.buckets):
            for param in bucket.flat_params:
                if self.param_memory.sharded[index]:
                    for part, begin in shard_parts(bucket, param, self.param_memory.shards[index]):
                        yield param, part, begin
                else:
                    yield param, self.param_memory.view(param).flatten(), 0

    def parts(self, shards: list[Tensor]) -> Iterator[tuple[FlatParam, Tensor, int]]:
        """Yield each parameter that has elements in the local shards.

        Args:
            shards: tensors of the local shards, by bucket; those of buckets to leave out are empty.

        Yields:
            The parameter, its part of `shards` and the index of the first element of that part in the parameter.
        """
        for bucket, shard in zip(self.buckets, shards, strict=True):
            for param in bucket.flat_params if len(shard) else ():
                for part, begin in shard_parts(bucket, param, shard):
                    yield param, part, begin
