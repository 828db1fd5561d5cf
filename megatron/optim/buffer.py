"""Flat memory for the parameters, gradients and fp32 master weights of this rank's part of a model.

Every parameter is a view into one tensor, and so is its gradient. The memory is cut into buckets. The gradients of a
bucket are reduced over the replicas together, with --overlap-grad-reduce during backward. With the distributed
optimizer (arXiv 1910.02054, stage 1) each replica owns a shard of every bucket: it alone gets the summed gradients of
the shard, holds its master weights and optimizer state, and sends the new weights to the other replicas.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from megatron.optim.layout import Bucket, FlatParam
from megatron.parallel.collectives import (
    Pending,
    all_reduce_sum,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
    start_reduce,
    start_reduce_scatter,
)
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Axis, Mesh
from megatron.parallel.parameters import named_parameters, parameter_on
from megatron.parallel.slices import Range, common, overlap
from megatron.parallel.timers import OFF, Timers

# Elements whose norm `norm` takes at once.
CHUNK_SIZE = 1 << 16


class ParamBuffer:
    """Flat memory of the model chunks of this rank.

    Attributes:
        params: [size] in the dtype that the model computes in.
        grads: [size] fp32, accumulated by backward.
        masters: fp32 master weights of the local shard of each bucket; in fp32 views of `params`.
        num_elements: parameters of the whole model, excluding vocabulary padding.
    """

    def __init__(
        self,
        chunks: list[nn.Module],
        buckets: list[Bucket],
        mesh: Mesh,
        config: ParallelConfig,
        *,
        dtype: torch.dtype,
        timers: Timers = OFF,
    ) -> None:
        """Move the parameters of `chunks` to flat memory. They have no values until `initialize`.

        Args:
            buckets: layout of the memory, which `lay_out` gives.
        """
        self.buckets, self.mesh, self.config, self.timers = buckets, mesh, config, timers
        size = self.buckets[-1].end
        self.params = torch.zeros(size, dtype=dtype, device=mesh.device)
        self.grads = torch.zeros(size, dtype=torch.float32, device=mesh.device)
        lengths = [bucket.shard[1] - bucket.shard[0] for bucket in self.buckets]
        if self.is_fp32:
            self.masters = [self.params[slice(*bucket.shard)] for bucket in self.buckets]
        else:
            master = torch.zeros(sum(lengths), dtype=torch.float32, device=mesh.device)
            self.masters = list(master.split(lengths))

        counted = [r for e in self.entries for r in e.flat(e.counted())]
        self.counted = [list(common(bucket.shard, counted)) for bucket in self.buckets]
        # Ranges of gradients that are partial sums over an axis.
        partial: dict[Axis, list[Range]] = collections.defaultdict(list)
        for bucket in self.buckets:
            for entry in bucket.entries:
                if entry.shard_spec.partial:
                    ranges = entry.flat(entry.shard_spec.shared)
                    partial[entry.shard_spec.replicas] += common(bucket.shard, ranges)
        self.partial = partial
        mine = sum(end - begin for begin, end in counted)
        self.num_elements = int(self._over_model(torch.tensor(mine, device=mesh.device)))

        self.final: set[int] = set()  # chunks whose last backward pass of the step has begun
        self.waiting = [len(bucket.entries) for bucket in self.buckets]
        # By index of the bucket: communication that has started, and the gradients that it reduces.
        self.reducing: dict[int, tuple[Tensor, list[Pending]]] = {}
        self.gathering: dict[int, list[Pending]] = {}
        self._attach(chunks)

    @property
    def is_fp32(self) -> bool:
        """True if the parameters are their own master weights."""
        return self.params.dtype == torch.float32

    @property
    def entries(self) -> list[FlatParam]:
        """All parameters in the order of memory."""
        return [entry for bucket in self.buckets for entry in bucket.entries]

    @property
    def local_elements(self) -> int:
        """Elements of the parameters of this rank."""
        return sum(entry.end - entry.start for entry in self.entries)

    def _attach(self, chunks: list[nn.Module]) -> None:
        """Replace parameters by views, and register the hooks that start reductions and wait for gathers."""
        entries = {(e.chunk, e.name): (e, i) for i, b in enumerate(self.buckets) for e in b.entries}
        for chunk, model in enumerate(chunks):
            for path, module in model.named_modules():
                needed = []
                for leaf, p in list(named_parameters(module, recurse=False)):
                    name = f"{path}.{leaf}" if path else leaf
                    entry, bucket = entries[chunk, p.tied or name]
                    p = parameter_on(entry.view(self.params), p)
                    setattr(module, leaf, p)
                    if self.is_fp32:
                        p.grad = entry.view(self.grads)
                    p.main_grad = entry.view(self.grads)
                    p.register_post_accumulate_grad_hook(self._on_grad(entry, bucket))
                    needed.append(bucket)
                if needed and self.config.overlap_param_gather:
                    module.register_forward_pre_hook(self._on_forward(needed))

    def _on_grad(self, entry: FlatParam, bucket: int) -> Callable[[Tensor], None]:
        grad = entry.view(self.grads)

        def accumulate(p: Tensor) -> None:
            # Layers that accumulate into main_grad themselves leave no gradient, but autograd still calls this hook.
            if p.grad is not None and not self.is_fp32:
                grad.add_(p.grad)
                p.grad = None
            if entry.chunk in self.final:
                self.waiting[bucket] -= 1
                if self.waiting[bucket] == 0:
                    self._start_reduce(bucket)

        return accumulate

    def _on_forward(self, needed: list[int]) -> Callable[..., None]:
        def wait(*_: object) -> None:
            for bucket in needed:
                self._finish_gather(bucket)

        return wait

    def begin_last_backward(self, chunk: int) -> None:
        """Note that the step's last backward pass through `chunk` begins, which completes its gradients."""
        if self.config.overlap_grad_reduce:
            self.final.add(chunk)

    def _start_reduce(self, index: int) -> None:
        """Start to sum the gradients of a bucket over the replicas, for each rank those of its shard."""
        bucket = self.buckets[index]
        axis = bucket.group.reduce_axis
        grads = self.grads[bucket.start : bucket.end]
        if self.config.grad_reduce_in_bf16 and axis.size > 1:
            grads = grads.bfloat16()
        shards = [grads[begin - bucket.start : end - bucket.start] for begin, end in bucket.shards]
        if len(shards) == 1:
            pending = [start_all_reduce(grads, axis)]
        elif bucket.is_even:
            pending = [start_reduce_scatter(grads, axis, out=shards[axis.rank])]
        else:
            pending = [start_reduce(x, rank, axis) for rank, x in enumerate(shards) if len(x)]
        self.reducing[index] = grads, pending

    def finish_reduce(self) -> None:
        """Wait until the gradients of the local shards are summed over the global batch."""
        for index in range(len(self.buckets)):
            if index not in self.reducing:
                self._start_reduce(index)
        for index, bucket in enumerate(self.buckets):
            grads, started = self.reducing.pop(index)
            for pending in started:
                pending.wait()
            if grads.dtype != self.grads.dtype:
                begin, end = bucket.shard
                self.grads[begin:end] = grads[begin - bucket.start : end - bucket.start]
            self.waiting[index] = len(bucket.entries)
            if bucket.tied:
                all_reduce_sum(self.grads[slice(*bucket.shard)], self.mesh.embedding)
        self.final.clear()
        for axis, ranges in self.partial.items():
            if axis.size == 1 or not ranges:
                continue
            parts = [self.grads[slice(*range_)] for range_ in ranges]
            summed = all_reduce_sum(torch.cat(parts), axis)
            for part, values in zip(parts, summed.split([len(part) for part in parts]), strict=True):
                part.copy_(values)

    def _over_model(self, x: Tensor) -> Tensor:
        """Sum `x` in place over the ranks that together hold one replica of the model."""
        return all_reduce_sum(all_reduce_sum(x, self.mesh.tp), self.mesh.pp)

    def total(self, pieces: list[Tensor], measure: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum a measure over the elements of the whole model, each counted once. Every rank must call this.

        Args:
            pieces: fp32 tensors of the local shards, by bucket.
            measure: maps a flat tensor to a scalar.
        """
        total = torch.zeros((), device=self.grads.device).double()
        found: dict[Axis, list[Tensor]] = {bucket.group.shard_axis: [] for bucket in self.buckets}
        for bucket, piece, ranges in zip(self.buckets, pieces, self.counted, strict=True):
            found[bucket.group.shard_axis] += [
                measure(piece[begin - bucket.shard[0] : end - bucket.shard[0]]).double()
                for begin, end in ranges
            ]
        for axis, sums in found.items():
            local = torch.stack(sums).sum() if sums else torch.zeros_like(total)
            total += all_reduce_sum(self._over_model(local), axis)
        return total

    def norm(self, pieces: list[Tensor]) -> Tensor:
        """L2 norm over the whole model, an fp32 scalar; `pieces` as in `total`."""
        return self.total(pieces, lambda x: norm(x).double().square()).sqrt().float()

    def local_shards(self, flat: Tensor) -> list[Tensor]:
        """Views of the local shard of each bucket in a flat tensor."""
        return [flat[slice(*bucket.shard)] for bucket in self.buckets]

    def sync_params(self) -> None:
        """Copy the master weights to the parameters of all replicas.

        With --overlap-param-gather it only starts to; modules wait before their next forward.
        """
        for index, (bucket, master) in enumerate(zip(self.buckets, self.masters, strict=True)):
            if not self.is_fp32:
                self.params[slice(*bucket.shard)] = master
            axis = bucket.group.shard_axis
            shards = [self.params[slice(*shard)] for shard in bucket.shards]
            if axis.size > 1 and bucket.is_even:
                flat = self.params[bucket.start : bucket.end]
                self.gathering[index] = [start_all_gather(shards[axis.rank], axis, out=flat)]
            elif axis.size > 1:
                self.gathering[index] = [
                    start_broadcast(x, rank, axis) for rank, x in enumerate(shards) if len(x)
                ]
        if not self.config.overlap_param_gather:
            self.finish_gathers()

    def finish_gathers(self) -> None:
        """Wait until all parameters have the values of the last step."""
        for index in range(len(self.buckets)):
            self._finish_gather(index)

    def _finish_gather(self, index: int) -> None:
        if index in self.gathering:
            with self.timers("params-gather"):
                for pending in self.gathering.pop(index):
                    pending.wait()

    def initialize(self, seed: int) -> None:
        """Set the initial values, which depend on seed, name and place in the whole model alone."""
        for bucket, master in zip(self.buckets, self.masters, strict=True):
            for entry in bucket.entries:
                values = torch.empty(entry.shard_spec.local_shape)
                entry.init(values, entry.shard_spec, seed, entry.name)
                entry.view(self.params).copy_(values)
                if not self.is_fp32:
                    for part, begin in _part(bucket, entry, master):
                        part.copy_(values.view(-1)[begin : begin + part.numel()])

    def parts(self, owned: list[Tensor]) -> Iterator[tuple[FlatParam, Tensor, int]]:
        """Yield each parameter that has elements in the local shards.

        Args:
            owned: tensors of the local shards, by bucket; those of buckets to leave out are empty.

        Yields:
            The parameter, its part of `owned` and the index of the first element of that part in the parameter.
        """
        for bucket, piece in zip(self.buckets, owned, strict=True):
            for entry in bucket.entries if len(piece) else ():
                for part, begin in _part(bucket, entry, piece):
                    yield entry, part, begin


def _part(bucket: Bucket, entry: FlatParam, piece: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield the part of `piece`, a bucket's local shard, that belongs to a parameter, and its index in it, if any."""
    both = overlap((entry.start, entry.end), bucket.shard)
    if both is not None:
        yield piece[both[0] - bucket.shard[0] : both[1] - bucket.shard[0]], both[0] - entry.start


def norm(flat: Tensor) -> Tensor:
    """L2 norm of a flat tensor, a scalar. It is taken chunk by chunk: one long fp32 sum is off by percents on a CPU."""
    whole = flat.numel() // CHUNK_SIZE * CHUNK_SIZE
    pieces = torch.linalg.vector_norm(flat[:whole].view(-1, CHUNK_SIZE), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:]).unsqueeze(0)
    return torch.linalg.vector_norm(torch.cat((pieces, rest)))
