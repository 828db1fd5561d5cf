"""Point-to-point transfers of activations and gradients between pipeline stages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.collectives import Pending, all_gather, local_shard, named
from megatron.parallel.mesh import ALONE, Axis, Mesh

# Limits on transfers in flight; each holds the memory of an activation. Gloo does not report that a send has completed
# until it is waited for.
MAX_PENDING_RECVS = 2
MAX_PENDING_SENDS = 4


class Transfers:
    """Asynchronous sends, which block only above `MAX_PENDING_SENDS`, and receives that are posted early."""

    def __init__(self, mesh: Mesh, *, scatter_gather: bool) -> None:
        """With `scatter_gather` each tensor-parallel rank sends its shard of a replicated tensor, and the ranks of the
        next stage all-gather the shards (arXiv 2104.04473 section 4.1)."""
        self.pp = mesh.pp
        self.tp = mesh.tp if scatter_gather else ALONE
        self.device = mesh.device
        self.heartbeat = mesh.heartbeat
        self.sending: deque[Pending] = deque()
        # Unlike its collectives, gloo's transfers keep the timeout with which their group was made.
        self.timeout = mesh.timeout if mesh.device.type == "cpu" else None

    def between(self, peer: int) -> Axis:
        """Axis of this stage and `peer`, for error messages."""
        ranks = (self.pp.ranks[self.pp.rank], self.pp.ranks[peer])
        return Axis(0, 2, self.pp.group, self.pp.name, ranks, self.heartbeat)

    def send(self, x: Tensor, peer: int) -> None:
        """Start sending `x`, any shape, to the stage `peer`; keeps its memory until the send completes."""
        part = local_shard(x.flatten(), self.tp) if self._is_split(x.shape) else x.contiguous()
        with named("send", self.between(peer)):
            work = dist.isend(part, group=self.pp.group, group_dst=peer)
        self.sending.append(Pending(part, work, "send", self.between(peer), self.timeout))
        while self.sending and (self.sending[0].done() or len(self.sending) > MAX_PENDING_SENDS):
            self.sending.popleft().wait()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Callable[[], Tensor]:
        """Start receiving a tensor from the stage `peer`; calling the result waits for it and returns it."""
        split = self._is_split(shape)
        part = torch.empty(
            math.prod(shape) // self.tp.size if split else shape, dtype=dtype, device=self.device
        )
        with named("receive", self.between(peer)):
            work = dist.irecv(part, group=self.pp.group, group_src=peer)
        pending = Pending(part, work, "receive", self.between(peer), self.timeout)

        def wait() -> Tensor:
            x = pending.wait()
            return all_gather(x, self.tp).view(shape) if split else x

        return wait

    def _is_split(self, shape: tuple[int, ...]) -> bool:
        return self.tp.size > 1 and math.prod(shape) % self.tp.size == 0

    def finish(self) -> None:
        """Wait until everything has been sent."""
        while self.sending:
            self.sending.popleft().wait()
