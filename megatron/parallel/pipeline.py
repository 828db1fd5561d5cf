"""Pipeline stages, and the executor that runs a schedule over them.

`schedules.py` makes the list of actions of every stage. The executor runs the list of this stage: it calls the stage's
`forward` and `backward`, and sends and receives activations and gradients asynchronously. Receives are posted before
they are needed. Any two ranks list the transfers between them in the same order.
"""

from __future__ import annotations

import abc
import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.parallel.phases import UNOBSERVED, Phases
from megatron.parallel.schedules import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Receive,
    Send,
    Validate,
)
from megatron.parallel.transfers import MAX_PENDING_RECVS, Transfers

# Names a transfer: (microbatch, chunk, True for activations and False for gradients).
TransferKey = tuple[int, int, bool]


class WgradQueue:
    """Products for weight gradients that a split backward pass leaves for later (arXiv 2401.10241 section 2)."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.open: list[Callable[[], None]] | None = None  # where products go now; None: they run at once

    def deferring(self, accumulate: Callable[..., None]) -> Callable[..., None]:
        """`accumulate`, whose calls wait during a split backward pass. Their arguments stay in memory."""

        def call(*args: Tensor) -> None:
            if self.open is None:
                accumulate(*args)
            else:
                # A view keeps its base, whose graph reaches the input of the pass.
                self.open.append(functools.partial(accumulate, *(x.detach() for x in args)))

        return call

    @contextmanager
    def split(self, key: tuple[int, int] | None) -> Iterator[None]:
        """Context of a backward pass. Its products wait for `run`, unless `key` is None."""
        if key is not None:
            self.open = self.waiting[key] = []
        yield
        self.open = None

    @torch.no_grad()
    def run(self, key: tuple[int, int]) -> None:
        for product in self.waiting.pop(key):
            product()


class PipelineStage(abc.ABC):
    """The model chunks of one pipeline rank, and the tensors that backward needs for the microbatches in flight.

    Attributes:
        hidden_dtype: dtype of the activations between chunks.
        wgrads: the products that split backward passes leave.
    """

    def __init__(self, hidden_dtype: torch.dtype, wgrads: WgradQueue | None = None) -> None:
        self.hidden_dtype, self.wgrads = hidden_dtype, wgrads or WgradQueue()
        # By (microbatch, chunk): the input of a forward pass, and the root of its backward pass.
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.roots: dict[tuple[int, int], GradientEdge | Tensor] = {}

    @abc.abstractmethod
    def recv_shape(self, microbatch: int) -> tuple[int, ...]:
        """Shape of a microbatch's activations between chunks."""

    @abc.abstractmethod
    def compute(self, chunk: int, microbatch: int, x: Tensor | None) -> Tensor:
        """Output of a chunk for `x`, the output of the previous chunk (None for the first). With gradients enabled, the
        model's last chunk returns the scalar loss."""

    def forward(self, chunk: int, microbatch: int, x: Tensor | None) -> Tensor:
        """Run `compute`, and record what backward needs if gradients are enabled. Returns the output detached."""
        if not torch.is_grad_enabled():
            return self.compute(chunk, microbatch, x)
        if x is not None:
            self.inputs[microbatch, chunk] = x.requires_grad_()
        out = self.compute(chunk, microbatch, x)
        # Backward needs the graph of an output but not its values, so their memory can be freed after the send.
        self.roots[microbatch, chunk] = out if out.dim() == 0 else get_gradient_edge(out)
        return out.detach()

    def backward(self, chunk: int, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """Run backward from `grad`, the gradient of the output (None for the loss). Returns the input's gradient."""
        torch.autograd.backward(self.roots.pop((microbatch, chunk)), grad)
        x = self.inputs.pop((microbatch, chunk), None)
        return None if x is None else x.grad

    def begin_last_backward(self, chunk: int) -> None:  # noqa: B027, most stages have nothing to do
        """Called before the last backward pass of a step through `chunk`, unless that is split."""


def run_schedule(
    stage: PipelineStage,
    actions: list[Action],
    transfers: Transfers,
    phases: Phases = UNOBSERVED,
    validate: Callable[[], bool] = lambda: True,
) -> bool:
    """Run a stage's `actions`; `phases` mark passes and transfers.

    The last sends may still be under way at return; `transfers.finish` waits for them.

    Args:
        validate: called at each `Validate`. If it returns False, here and on all other stages, the remaining actions
            are left out, and no transfer is under way at return.

    Returns:
        False if actions were left out.
    """
    executor = _Executor(stage, actions, transfers, phases)
    for action in actions:
        executor.execute(action)
        if isinstance(action, Validate) and not validate():
            executor.end_transfers()
            return False
    return True


class _Executor:
    def __init__(
        self, stage: PipelineStage, actions: list[Action], transfers: Transfers, phases: Phases
    ) -> None:
        self.stage, self.transfers, self.phases = stage, transfers, phases
        self.last = {a.chunk: a for a in actions if isinstance(a, Backward | BackwardWeight)}
        self.chunks = 1 + max(action.chunk for action in actions if not isinstance(action, Validate))
        self.sent = {_key(action) for action in actions if isinstance(action, Send)}
        # No receive is posted ahead of a `Validate` that it follows.
        self.transfers_left = deque(a for a in actions if isinstance(a, Send | Receive | Validate))
        self.outgoing: dict[TransferKey, Tensor] = {}
        self.incoming: dict[TransferKey, Callable[[], Tensor]] = {}

    def execute(self, action: Action) -> None:
        self._post_receives()
        match action:
            case Forward(microbatch=microbatch, chunk=chunk):
                x = self._received((microbatch, chunk, True), "forward-recv")
                with self.phases("forward-compute"):
                    self._keep((microbatch, chunk, True), self.stage.forward(chunk, microbatch, x))
            case (
                Backward(microbatch=microbatch, chunk=chunk)
                | BackwardInput(microbatch=microbatch, chunk=chunk)
            ):
                grad = self._received((microbatch, chunk, False), "backward-recv")
                if self.last[chunk] == action:
                    self.stage.begin_last_backward(chunk)
                left = (microbatch, chunk) if isinstance(action, BackwardInput) else None
                with self.phases("backward-compute"), self.stage.wgrads.split(left):
                    self._keep((microbatch, chunk, False), self.stage.backward(chunk, microbatch, grad))
            case BackwardWeight(microbatch=microbatch, chunk=chunk):
                with self.phases("backward-compute"):
                    self.stage.wgrads.run((microbatch, chunk))
            case Receive():
                while action in self.transfers_left:
                    self._post_receive()
            case Send():
                assert self.transfers_left.popleft() == action
                with self.phases("forward-send" if action.forward else "backward-send"):
                    self.transfers.send(self.outgoing.pop(_key(action)), action.peer)
            case Validate():
                assert self.transfers_left.popleft() == action
        self.transfers.heartbeat.steps += 1

    def end_transfers(self) -> None:
        """Wait for the transfers that have started."""
        for wait in self.incoming.values():
            wait()
        self.transfers.finish()

    def _keep(self, key: TransferKey, x: Tensor | None) -> None:
        """Keep the result of a pass until it is sent, or until this rank's next chunk takes it."""
        microbatch, chunk, forward = key
        following = chunk + 1 if forward else chunk - 1
        if x is None:
            return
        if key in self.sent:
            self.outgoing[key] = x
        elif 0 <= following < self.chunks:
            self.incoming[microbatch, following, forward] = lambda: x

    def _post_receives(self) -> None:
        """Post the receives listed before the next send, up to `MAX_PENDING_RECVS` at a time."""
        left = self.transfers_left
        while left and isinstance(left[0], Receive) and len(self.incoming) < MAX_PENDING_RECVS:
            self._post_receive()

    def _post_receive(self) -> None:
        action = self.transfers_left.popleft()
        assert isinstance(action, Receive)
        shape = self.stage.recv_shape(action.microbatch)
        self.incoming[_key(action)] = self.transfers.receive(shape, self.stage.hidden_dtype, action.peer)

    def _received(self, key: TransferKey, phase: str) -> Tensor | None:
        """Input of a pass; None if it has none."""
        wait = self.incoming.pop(key, None)
        if wait is None:
            return None
        with self.phases(phase):
            return wait()


def _key(action: Send | Receive) -> TransferKey:
    return action.microbatch, action.chunk, action.forward
