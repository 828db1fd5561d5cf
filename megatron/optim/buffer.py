"""Parameters, gradients and fp32 master weights of this process's part of a model, in flat memory.

Every parameter is a view into one tensor, and so is its gradient. That memory is divided into buckets, each of which
is reduced over the data-parallel replicas in one call, while backward still works on the others if asked to.
With the distributed optimizer (arXiv 1910.02054, stage 1) each replica owns an equal part of every bucket: it
receives the sum of that part's gradient alone, holds its master weights and optimizer state, and gives the new
weights to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from megatron.optim.layout import Bucket, Entry, lay_out
from megatron.parallel.collectives import (
    Pending,
    all_reduce_sum,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import ALONE, Mesh
from megatron.parallel.parameters import parameter_on
from megatron.parallel.slices import common, overlap
from megatron.parallel.timers import OFF, Timers

# Elements that `norm` sums at once.
PIECE = 1 << 16


class ParamBuffer:
    """Flat storage of the chunks of a model that this process holds.

    Attributes:
        params: [size], in the dtype that the model computes in.
        grads: [size] fp32; backward adds to it.
        masters: fp32 weights of what this replica owns of each bucket; views of `params` when the model computes
            in fp32.
        num_elements: elements of the whole model, each counted once, and no padding of the vocabulary.
    """

    def __init__(
        self,
        chunks: list[nn.Module],
        mesh: Mesh,
        config: ParallelConfig,
        *,
        dtype: torch.dtype,
        timers: Timers = OFF,
    ) -> None:
        """Give the parameters of `chunks` flat memory. Their values are undefined until `initialize`."""
        self.mesh, self.config, self.timers = mesh, config, timers
        self.shards = mesh.dp if config.use_distributed_optimizer else ALONE
        self.buckets = lay_out(chunks, bucket_size=config.ddp_bucket_size, shards=self.shards)
        size = self.buckets[-1].end
        self.params = torch.zeros(size, dtype=dtype, device=mesh.device)
        self.grads = torch.zeros(size, dtype=torch.float32, device=mesh.device)
        lengths = [bucket.owned[1] - bucket.owned[0] for bucket in self.buckets]
        if self.is_fp32:
            self.masters = [self.params[slice(*bucket.owned)] for bucket in self.buckets]
        else:
            master = torch.zeros(sum(lengths), dtype=torch.float32, device=mesh.device)
            self.masters = list(master.split(lengths))

        counted = [r for e in self.entries for r in e.flat(e.counted(mesh.tp))]
        self.counted = [list(common(bucket.owned, counted)) for bucket in self.buckets]
        shares = [r for e in self.entries if e.place.partial for r in e.flat(e.place.shared)]
        self.shares = [r for bucket in self.buckets for r in common(bucket.owned, shares)]
        mine = sum(end - begin for begin, end in counted)
        self.num_elements = int(self._over_model(torch.tensor(mine, device=mesh.device)))

        self.final: set[int] = set()  # chunks in whose last backward pass of the step we are
        self.waiting = [len(bucket.entries) for bucket in self.buckets]
        self.reducing: list[Pending | None] = [None] * len(self.buckets)
        self.gathering: list[Pending | None] = [None] * len(self.buckets)
        self._attach(chunks)

    @property
    def is_fp32(self) -> bool:
        """Whether parameters are their own master weights."""
        return self.params.dtype == torch.float32

    @property
    def entries(self) -> list[Entry]:
        return [entry for bucket in self.buckets for entry in bucket.entries]

    @property
    def local_elements(self) -> int:
        """Elements of the parameters that this process holds."""
        return sum(entry.end - entry.start for entry in self.entries)

    def _attach(self, chunks: list[nn.Module]) -> None:
        """Make the parameters of the chunks views, and have gradients and modules tell when they are due."""
        entries = {(e.chunk, e.name): (e, i) for i, b in enumerate(self.buckets) for e in b.entries}
        for chunk, model in enumerate(chunks):
            for path, module in model.named_modules():
                needed = []
                for leaf, p in list(module.named_parameters(recurse=False)):
                    name = f"{path}.{leaf}" if path else leaf
                    entry, bucket = entries[chunk, p.tied or name]
                    p = parameter_on(entry.view(self.params), p)
                    setattr(module, leaf, p)
                    if self.is_fp32:
                        p.grad = entry.view(self.grads)
                    p.gradient_sum = entry.view(self.grads)
                    p.register_post_accumulate_grad_hook(self._on_grad(entry, bucket))
                    needed.append(bucket)
                if needed and self.config.overlap_param_gather:
                    module.register_forward_pre_hook(self._on_forward(needed))

    def _on_grad(self, entry: Entry, bucket: int) -> Callable[[Tensor], None]:
        grad = entry.view(self.grads)

        def accumulate(p: Tensor) -> None:
            # There is none where a layer has added it itself; autograd comes here all the same.
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
        """The backward pass that begins now is the step's last through `chunk`: its gradients become final."""
        if self.config.overlap_grad_reduce:
            self.final.add(chunk)

    def _start_reduce(self, index: int) -> None:
        bucket = self.buckets[index]
        grads = self.grads[bucket.start : bucket.end]
        if self.config.grad_reduce_in_bf16 and self.mesh.dp.size > 1:
            grads = grads.bfloat16()
        begin, end = (i - bucket.start for i in bucket.owned)
        if self.shards.size > 1:
            self.reducing[index] = start_reduce_scatter(grads, self.mesh.dp, out=grads[begin:end])
        else:
            self.reducing[index] = start_all_reduce(grads, self.mesh.dp)

    def finish_reduce(self) -> None:
        """Make the gradients of what this replica owns those of the whole global batch."""
        for index, pending in enumerate(self.reducing):
            if pending is None:
                self._start_reduce(index)
        for index, bucket in enumerate(self.buckets):
            reduced = self.reducing[index].wait()
            if reduced.dtype != self.grads.dtype:
                self.grads[slice(*bucket.owned)] = reduced
            self.reducing[index] = None
            self.waiting[index] = len(bucket.entries)
            if bucket.tied:
                all_reduce_sum(self.grads[slice(*bucket.owned)], self.mesh.ends)
        self.final.clear()
        if self.shares and self.mesh.tp.size > 1:
            parts = [self.grads[slice(*range_)] for range_ in self.shares]
            summed = all_reduce_sum(torch.cat(parts), self.mesh.tp)
            for part, values in zip(parts, summed.split([len(part) for part in parts]), strict=True):
                part.copy_(values)

    def _over_model(self, x: Tensor) -> Tensor:
        """The sum of `x` over the processes that together hold one replica of the model."""
        return all_reduce_sum(all_reduce_sum(x, self.mesh.tp), self.mesh.pp)

    def total(self, pieces: list[Tensor], measure: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum over the whole model, each element once, of what `measure` finds in fp32 tensors, a scalar.

        `pieces` are those of each bucket that this replica owns. Every process must take part.
        """
        found = [
            measure(piece[begin - bucket.owned[0] : end - bucket.owned[0]]).double()
            for bucket, piece, ranges in zip(self.buckets, pieces, self.counted, strict=True)
            for begin, end in ranges
        ]
        local = torch.stack(found).sum() if found else torch.zeros((), device=self.grads.device).double()
        return all_reduce_sum(self._over_model(local), self.shards)

    def norm(self, pieces: list[Tensor]) -> Tensor:
        """L2 norm over the whole model, a scalar; `pieces` as for `total`."""
        return self.total(pieces, lambda x: norm(x).double().square()).sqrt().float()

    def owned(self, flat: Tensor) -> list[Tensor]:
        """What this replica owns of a flat tensor, by bucket."""
        return [flat[slice(*bucket.owned)] for bucket in self.buckets]

    def publish(self) -> None:
        """Make the parameters of every replica those of the updated master weights."""
        for index, (bucket, master) in enumerate(zip(self.buckets, self.masters, strict=True)):
            if not self.is_fp32:
                self.params[slice(*bucket.owned)] = master
            if self.shards.size > 1:
                flat = self.params[bucket.start : bucket.end]
                own = self.params[slice(*bucket.owned)]
                self.gathering[index] = start_all_gather(own, self.shards, out=flat)
        if not self.config.overlap_param_gather:
            self.finish_gathers()

    def finish_gathers(self) -> None:
        """Wait until the parameters are those of the last step."""
        for index in range(len(self.buckets)):
            self._finish_gather(index)

    def _finish_gather(self, index: int) -> None:
        if self.gathering[index] is not None:
            with self.timers("params-gather"):
                self.gathering[index].wait()
            self.gathering[index] = None

    def initialize(self, seed: int) -> None:
        """Give every parameter the initial values that (seed, name, place) stand for."""
        for bucket, master in zip(self.buckets, self.masters, strict=True):
            for entry in bucket.entries:
                values = torch.empty(entry.place.local_shape)
                entry.init(values, entry.place, seed, entry.name)
                entry.view(self.params).copy_(values)
                if not self.is_fp32:
                    for part, begin in _part(bucket, entry, master):
                        part.copy_(values.view(-1)[begin : begin + part.numel()])

    def parts(self, owned: list[Tensor]) -> Iterator[tuple[Entry, Tensor, int]]:
        """What is owned here of every parameter: the parameter, the flat part, and where in it that begins."""
        for bucket, piece in zip(self.buckets, owned, strict=True):
            for entry in bucket.entries:
                for part, begin in _part(bucket, entry, piece):
                    yield entry, part, begin


def _part(bucket: Bucket, entry: Entry, piece: Tensor) -> Iterator[tuple[Tensor, int]]:
    """The part of an owned piece of a bucket that belongs to a parameter, if any, and where in that it begins."""
    both = overlap((entry.start, entry.end), bucket.owned)
    if both is not None:
        yield piece[both[0] - bucket.owned[0] : both[1] - bucket.owned[0]], both[0] - entry.start


def norm(flat: Tensor) -> Tensor:
    """L2 norm of a flat tensor, a scalar. Taken of pieces first: one long sum in fp32 loses percents on a CPU."""
    whole = flat.numel() // PIECE * PIECE
    pieces = torch.linalg.vector_norm(flat[:whole].view(-1, PIECE), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:]).unsqueeze(0)
    return torch.linalg.vector_norm(torch.cat((pieces, rest)))
