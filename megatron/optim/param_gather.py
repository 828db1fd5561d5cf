"""All-gather of updated parameters, with the distributed optimizer."""

from __future__ import annotations

from torch import Tensor

from megatron.optim.layout import Bucket
from megatron.parallel.collectives import Pending, start_all_gather, start_broadcast
from megatron.parallel.phases import Phases


class ParamGather:
    """Gathers the parameters of each bucket from the ranks that updated them.

    Attributes:
        pending: communication that has started, by index of the bucket.
    """

    def __init__(self, params: Tensor, buckets: list[Bucket], phases: Phases) -> None:
        """`params` is flat memory for the parameters."""
        self.params, self.buckets, self.phases = params, buckets, phases
        self.pending: dict[int, list[Pending]] = {}

    def start(self, index: int) -> None:
        """Start gathering the parameters of bucket `index`."""
        bucket = self.buckets[index]
        axis = bucket.group.shard_axis
        if axis.size == 1:
            return
        shards = [self.params[slice(*shard)] for shard in bucket.shards]
        if bucket.is_even:
            flat = self.params[bucket.start : bucket.end]
            self.pending[index] = [start_all_gather(shards[axis.rank], axis, out=flat)]
        else:
            self.pending[index] = [start_broadcast(x, rank, axis) for rank, x in enumerate(shards) if len(x)]

    def wait(self, index: int) -> None:
        """Wait until the parameters of bucket `index` have the values of the last step."""
        if index in self.pending:
            with self.phases("params-gather"):
                for pending in self.pending.pop(index):
                    pending.wait()

    def finish(self) -> None:
        """Wait until all parameters have the values of the last step."""
        for index in range(len(self.buckets)):
            self.wait(index)
