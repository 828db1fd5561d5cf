"""Layout of flat memory: groups of parameters, the elements of each parameter, and buckets."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from megatron.optim.spec import OptimizerSpec
from megatron.parallel.mesh import ALONE, Axis
from megatron.parallel.parameters import Init, ShardedParameter, named_parameters
from megatron.parallel.slices import GlobalSlice, Range, intersections, subtract

# Elements that the start of each parameter is a multiple of, for matrix kernels.
ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatParam:
    """A parameter in flat memory.

    Attributes:
        name: name in the whole model.
        chunk: index of its model chunk on this rank.
        start: index of its first element.
        tied: the first and the last pipeline stage both hold it.
        copy: it is tied, and this is the last stage's.
    """

    name: str
    chunk: int
    shard_spec: GlobalSlice
    init: Init
    start: int
    tied: bool
    copy: bool

    @property
    def end(self) -> int:
        """Index after its last element."""
        return self.start + math.prod(self.shard_spec.local_shape)

    def view(self, flat: Tensor, origin: int = 0) -> Tensor:
        """View of the parameter, in its shape, in a flat tensor whose first element is element `origin` of memory."""
        return flat[self.start - origin : self.end - origin].view(self.shard_spec.local_shape)

    def counted(self) -> list[Range]:
        """Ranges of local rows to count and save: no vocabulary padding, and each row on one rank only."""
        spec, rows = self.shard_spec, self.shard_spec.local_shape[0]
        if self.copy:
            return []
        if spec.num_valid_rows is not None:
            rows = min(max(spec.num_valid_rows - spec.ranges[0][0], 0), rows)
        return subtract((0, rows), spec.shared if spec.replicas.rank > 0 else ())

    @property
    def num_counted(self) -> int:
        """Number of elements in the rows of `counted`."""
        return sum(end - begin for begin, end in self.flat(self.counted()))

    def flat(self, rows: Iterable[Range]) -> list[Range]:
        """Convert ranges of rows to ranges of flat memory."""
        start, row = self.start, self.shard_spec.row
        return [(start + begin * row, start + end * row) for begin, end in rows if begin < end]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Parameters that share an optimizer, weight decay and the axis over which gradients are summed.

    Attributes:
        decays: weight decay applies. It does to matrices, but not to vectors.
        expert_parallel: the parameters are those that the mesh's axis `expert` divides.
        model_axis: ranks that divide the parameters of a pipeline stage.
        reduce_axis: ranks over which gradients are summed.
        shard_axis: ranks over which master weights and optimizer state are sharded. It is `reduce_axis` or a part of it
            with the distributed optimizer, otherwise of size 1.
        instance_axis: ranks of `reduce_axis` that have the same shard, where `shard_axis` is a part of it.
        shards_grads, shards_params: gradients and parameters are sharded over these ranks too.
    """

    optimizer: OptimizerSpec
    decays: bool
    expert_parallel: bool = False
    model_axis: Axis = ALONE
    reduce_axis: Axis
    shard_axis: Axis
    instance_axis: Axis = ALONE
    shards_grads: bool = False
    shards_params: bool = False

    def holds(self, name: str, p: ShardedParameter) -> bool:
        """True if the parameter belongs to the group, unless an earlier group holds it."""
        fits = (p.dim() >= 2) == self.decays and p.shard_spec.expert_parallel == self.expert_parallel
        return fits and self.optimizer.updates(name, p)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Range of flat memory whose gradients are reduced together.

    Attributes:
        shards: the range that each rank of the group's `shard_axis` updates.
        tied: the first and the last pipeline stage both hold its only parameter.
    """

    start: int
    end: int
    shards: tuple[Range, ...]
    group: ParamGroup
    tied: bool
    flat_params: tuple[FlatParam, ...]

    @functools.cached_property
    def is_even(self) -> bool:
        """True if all shards have the same length."""
        return len({end - begin for begin, end in self.shards}) == 1

    @property
    def shard(self) -> Range:
        """Local shard: the range that this rank updates."""
        return self.shards[self.group.shard_axis.rank]

    def cut(self, whole: Tensor, shard: Range) -> Tensor:
        """A shard of `whole`, all elements of the bucket."""
        return whole[shard[0] - self.start : shard[1] - self.start]

    @functools.cached_property
    def counted(self) -> list[Range]:
        """Ranges of the local shard to count (see `FlatParam.counted`)."""
        ranges = [range_ for param in self.flat_params for range_ in param.flat(param.counted())]
        return intersections(self.shard, ranges)


class Item(NamedTuple):
    """A parameter that is not in flat memory yet."""

    group: int  # index of its group
    name: str
    p: ShardedParameter
    chunk: int  # index of its model chunk on this rank


def lay_out(chunks: list[nn.Module], groups: Sequence[ParamGroup], *, bucket_size: int) -> list[Bucket]:
    """Put the parameters of model chunks into buckets of about `bucket_size` elements.

    A bucket belongs to one group. Within a group parameters are in the order of forward, except that vectors that every
    tensor-parallel rank holds come last. A tied table has a bucket of its own, so that the first and the last pipeline
    stage shard it alike. Where gradients are sharded, a bucket belongs to one unit.
    """
    items = [
        Item(next(i for i, group in enumerate(groups) if group.holds(name, p)), name, p, chunk)
        for chunk, model in enumerate(chunks)
        for name, p in named_parameters(model)
    ]
    unit_of: dict[Tensor, tuple[int, int]] = {}
    if any(group.shards_grads for group in groups):
        from megatron.optim.units import places

        unit_of = places(chunks)

    def kind(item: Item) -> tuple[int, bool, tuple[int, int], bool]:
        unit = unit_of[item.p] if groups[item.group].shards_grads else (0, 0)
        vector = item.p.dim() < 2 and bool(item.p.shard_spec.shared)
        return item.group, item.p.tied is not None, unit, vector

    batches: list[list[Item]] = []
    size = 0
    for item in sorted(items, key=kind):
        if not batches or size >= bucket_size or kind(batches[-1][-1])[:3] != kind(item)[:3]:
            batches.append([])
            size = 0
        batches[-1].append(item)
        size += math.prod(item.p.shard_spec.local_shape)

    buckets: list[Bucket] = []
    for batch in batches:
        start = buckets[-1].end if buckets else 0
        buckets.append(_bucket(batch, groups[batch[0].group], start))
    by_group = itertools.groupby(buckets, key=lambda bucket: bucket.group)
    return [bucket for group, part in by_group for bucket in group.optimizer.arrange(list(part))]


def _bucket(items: list[Item], group: ParamGroup, start: int) -> Bucket:
    """Make a bucket of parameters of one group, from element `start` of flat memory.

    It is cut into equal shards for the ranks of the group's `shard_axis`.
    """
    flat_params: list[FlatParam] = []
    end = start
    for _, name, p, chunk in items:
        param = FlatParam(
            name=p.tied or name,
            chunk=chunk,
            shard_spec=p.shard_spec,
            init=p.init,
            start=end,
            tied=p.tied is not None,
            copy=p.tied not in (None, name),
        )
        flat_params.append(param)
        end = start + round_up(param.end - start, ALIGNMENT)
    ranks = group.shard_axis.size
    length = round_up(end - start, ALIGNMENT * ranks) // ranks
    return Bucket(
        start=start,
        end=start + ranks * length,
        shards=tuple((start + rank * length, start + (rank + 1) * length) for rank in range(ranks)),
        group=group,
        tied=flat_params[0].tied,
        flat_params=tuple(flat_params),
    )


def round_up(n: int, unit: int) -> int:
    """Round `n` up to a multiple of `unit`."""
    return -(-n // unit) * unit
