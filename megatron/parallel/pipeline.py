"""Runs a pipeline schedule: computes, and passes activations and their gradients between stages.

What to do, and in which order, is the list of actions that `schedules.py` made for this stage. Sends never block;
receives are started ahead of need, in the order of the list, which all stages share.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.parallel.collectives import Pending, all_gather, named, share
from megatron.parallel.mesh import ALONE, Axis, Mesh
from megatron.parallel.schedules import Action, Backward, Forward, Receive, Send
from megatron.parallel.timers import OFF, Timers

# How many receives are under way before the first of them is needed, and how many sends that were not waited for.
# Each holds the memory of an activation. Gloo does not tell that something has been sent until it is waited for.
AHEAD = 2
BEHIND = 4

# Of (chunk, microbatch, what the chunk before gave): what the chunk gives, or after the last the loss, a scalar.
Compute = Callable[[int, int, Tensor | None], Tensor]


class Transfers:
    """Point-to-point traffic between neighbouring stages."""

    def __init__(self, mesh: Mesh, *, scatter_gather: bool) -> None:
        """`scatter_gather`: what all tensor-parallel processes of a stage hold alike is sent by each of them in
        part, and put together again by those of the next stage (arXiv 2104.04473 section 4.1)."""
        self.pp = mesh.pp
        self.tp = mesh.tp if scatter_gather else ALONE
        self.device = mesh.device
        self.activity = mesh.activity
        self.sending: deque[Pending] = deque()

    def between(self, peer: int) -> Axis:
        """This stage and another, for messages."""
        ranks = (self.pp.ranks[self.pp.rank], self.pp.ranks[peer])
        return Axis(0, 2, self.pp.group, self.pp.name, ranks, self.activity)

    def send(self, x: Tensor, peer: int) -> None:
        """Begin to send `x`, any shape, to the stage `peer`; its memory is kept until it has gone."""
        part = share(x.flatten(), self.tp) if self._divided(x.shape) else x.contiguous()
        with named("send", self.between(peer)):
            work = dist.isend(part, group=self.pp.group, group_dst=peer)
        self.sending.append(Pending(part, work, "send", self.between(peer)))
        while self.sending and (self.sending[0].done() or len(self.sending) > BEHIND):
            self.sending.popleft().wait()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> Callable[[], Tensor]:
        """Begin to receive a tensor from the stage `peer`. Gives what waits for it."""
        divided = self._divided(shape)
        part = torch.empty(
            math.prod(shape) // self.tp.size if divided else shape, dtype=dtype, device=self.device
        )
        with named("receive", self.between(peer)):
            work = dist.irecv(part, group=self.pp.group, group_src=peer)
        pending = Pending(part, work, "receive", self.between(peer))

        def wait() -> Tensor:
            x = pending.wait()
            return all_gather(x, self.tp).view(shape) if divided else x

        return wait

    def _divided(self, shape: tuple[int, ...]) -> bool:
        return self.tp.size > 1 and math.prod(shape) % self.tp.size == 0

    def finish(self) -> None:
        """Wait until everything has been sent."""
        while self.sending:
            self.sending.popleft().wait()


def run_schedule(
    actions: list[Action],
    compute: Compute,
    transfers: Transfers,
    *,
    shape: Callable[[int], tuple[int, ...]],
    dtype: torch.dtype,
    begin_last_backward: Callable[[int], None] = lambda chunk: None,
    timers: Timers = OFF,
) -> None:
    """Carry out this stage's `actions`.

    Args:
        shape: of what is passed between chunks, by microbatch.
        dtype: of the same.
        begin_last_backward: called with a chunk before the last backward pass through it.
        timers: of the passes and transfers.
    """
    _Run(actions, compute, transfers, shape, dtype, begin_last_backward, timers).run()


class _Run:
    def __init__(
        self,
        actions: list[Action],
        compute: Compute,
        transfers: Transfers,
        shape: Callable[[int], tuple[int, ...]],
        dtype: torch.dtype,
        begin_last_backward: Callable[[int], None],
        timers: Timers,
    ) -> None:
        self.actions, self.compute, self.transfers = actions, compute, transfers
        self.shape, self.dtype, self.begin_last_backward = shape, dtype, begin_last_backward
        self.timers = timers
        backwards = [action for action in actions if isinstance(action, Backward)]
        self.trains = bool(backwards)
        self.last = {action.chunk: action for action in backwards}
        self.sends = {_what(action) for action in actions if isinstance(action, Send)}
        self.transfers_left = deque(action for action in actions if isinstance(action, Send | Receive))
        # By (microbatch, chunk): what a forward pass read, and where its backward pass begins.
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.roots: dict[tuple[int, int], GradientEdge | Tensor] = {}
        # By (microbatch, chunk, whether forward): what is to be sent, and what is being received.
        self.outgoing: dict[tuple[int, int, bool], Tensor] = {}
        self.incoming: dict[tuple[int, int, bool], Callable[[], Tensor]] = {}

    def run(self) -> None:
        for action in self.actions:
            self._receive_ahead()
            match action:
                case Forward():
                    self._forward(action.microbatch, action.chunk)
                case Backward():
                    self._backward(action.microbatch, action.chunk)
                case Receive():
                    while action in self.transfers_left:
                        self._start_receive()
                case Send():
                    following = self.transfers_left.popleft()
                    assert following == action
                    with self.timers("forward-send" if action.forward else "backward-send"):
                        self.transfers.send(self.outgoing.pop(_what(action)), action.peer)
            self.transfers.activity.steps += 1
        self.transfers.finish()

    def _receive_ahead(self) -> None:
        """Start the receives that come before this stage's next send."""
        left = self.transfers_left
        while left and isinstance(left[0], Receive) and len(self.incoming) < AHEAD:
            self._start_receive()

    def _start_receive(self) -> None:
        action = self.transfers_left.popleft()
        self.incoming[_what(action)] = self.transfers.receive(
            self.shape(action.microbatch), self.dtype, action.peer
        )

    def _received(self, microbatch: int, chunk: int, forward: bool) -> Tensor | None:
        """What has come for a pass, where something was to come."""
        wait = self.incoming.pop((microbatch, chunk, forward), None)
        if wait is None:
            return None
        with self.timers("forward-recv" if forward else "backward-recv"):
            return wait()

    def _forward(self, microbatch: int, chunk: int) -> None:
        x = self._received(microbatch, chunk, True)
        if x is not None and self.trains:
            self.inputs[microbatch, chunk] = x.requires_grad_()
        with self.timers("forward-compute"):
            out = self.compute(chunk, microbatch, x)
        sent = (microbatch, chunk, True) in self.sends
        if sent:
            self.outgoing[microbatch, chunk, True] = out.detach()
        if self.trains:
            # Backward needs where an output came from, not its values: once sent, their memory is free.
            self.roots[microbatch, chunk] = get_gradient_edge(out) if sent else out

    def _backward(self, microbatch: int, chunk: int) -> None:
        grad = self._received(microbatch, chunk, False)
        if self.last[chunk].microbatch == microbatch:
            self.begin_last_backward(chunk)
        with self.timers("backward-compute"):
            torch.autograd.backward(self.roots.pop((microbatch, chunk)), grad)
        x = self.inputs.pop((microbatch, chunk), None)
        if x is not None:
            self.outgoing[microbatch, chunk, False] = x.grad


def _what(action: Send | Receive) -> tuple[int, int, bool]:
    return action.microbatch, action.chunk, action.forward
