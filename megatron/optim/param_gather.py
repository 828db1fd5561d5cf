"""All-gather of updated parameters, with the distributed optimizer."""

from __future__ import annotations

from megatron.optim.layout import Bucket
from megatron.optim.memory import FlatMemory
from megatron.parallel.collectives import Pending, start_all_gather, start_broadcast
from megatron.parallel.phases import Phases


class ParamGather:
    """Gathers the parameters of each bucket from the ranks that updated them.

    Attributes:
        pending: communication that has started, by index of the bucket.
    """

    def __init__(self, memory: FlatMemory, buckets: list[Bucket], phases: Phases) -> None:
        """`memory` is that of the parameters."""
        self.memory, self.buckets, self.phases = memory, buckets, phases
        self.pending: dict[int, list[Pending]] = {}

    def start(self, index: int) -> None:
        """Start gathering the parameters of bucket `index`."""
        bucket = self.buckets[index]
        axis = bucket.group.shard_axis
        if axis.size == 1:
            return
        whole = self.memory.whole[index]
        if bucket.is_even:  # one call, whose time on the host does not grow with the ranks
            self.pending[index] = [start_all_gather(bucket.cut(whole, bucket.shard), axis, out=whole)]
        else:
            shards = [bucket.cut(whole, shard) for shard in bucket.shards]
            self.pending[index] = [start_broadcast(x, rank, axis) for rank, x in enumerate(shards) if len(x)]

    def start_whole(self, index: int) -> None:
        """Start gathering bucket `index` if its parameters are sharded, and are neither here nor on the way."""
        if not self.memory.sharded[index] or self.memory.has(index):
            return
        bucket = self.buckets[index]
        self.memory.allocate(index)
        bucket.cut(self.memory.whole[index], bucket.shard).copy_(self.memory.shards[index])
        self.start(index)

    def free(self, index: int) -> None:
        """Free the gathered parameters of bucket `index` if they are sharded."""
        if self.memory.sharded[index]:
            self.wait(index)
            self.memory.free(index)

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
