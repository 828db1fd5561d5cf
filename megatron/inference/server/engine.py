"""Serving engine: an event loop takes requests from many clients, and another thread computes.

The model runs on the main thread: collectives and a GPU's context need one thread, and signals arrive there. The event
loop puts functions into a queue, which the engine runs between two tokens. After each step the engine sends the new
text back to the loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import math
import queue
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

from megatron.errors import InputError
from megatron.inference.batching import Batcher, Request, SequenceState, TokenLogprob
from megatron.inference.beam import BeamConfig, Hypothesis, beam_search
from megatron.inference.predictor import NonFiniteLogits, Predictor
from megatron.inference.server.errors import ApiError
from megatron.inference.server.metrics import Metrics
from megatron.tokenizer import Tokenizer

STOPPING = "the server is stopping"
NOT_FINITE = "the model computed values that are not finite for this request"


@dataclasses.dataclass(frozen=True)
class TextDelta:
    """New text of one of the sequences of a request.

    Attributes:
        index: of the sequence in the request.
        text: final text since the previous delta.
        token: the new token; None if the sequence ended without one.
        end_token: the token that ended the sequence, if it is not part of it.
        logprob: of `token` or `end_token`, if requested.
        prompt_logprobs: of the prompt's tokens except the first, if requested; the same in every delta.
        reason: why the sequence ended, "stop" or "length"; None before.
    """

    index: int
    text: str
    token: int | None
    end_token: int | None
    logprob: TokenLogprob | None
    prompt_logprobs: list[TokenLogprob]
    reason: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchRequest:
    """A beam search. No other sequence runs at the same time."""

    prompt: Sequence[int]
    config: BeamConfig
    length: int
    ends: Collection[int]


Work = Sequence[Request] | BeamSearchRequest
Event = TextDelta | list[Hypothesis]


class RequestHandle:
    """A client's request of `count` sequences. Used on the event loop's thread.

    Attributes:
        param: the field of the request that has its prompts.
    """

    def __init__(
        self, engine: ServingEngine, model: ServedModel, count: int, timeout: float, param: str
    ) -> None:
        self.engine, self.model, self.param = engine, model, param
        self.loop = asyncio.get_running_loop()
        self.open = self.count = count
        self._events: asyncio.Queue[Event | ApiError] = asyncio.Queue()
        self._begin, self._has_begun = self.loop.time(), False
        self._timer = self.loop.call_later(timeout, self.fail, request_timeout(timeout))

    def start(self, work: Work) -> None:
        """Enqueue the request's sequences, unless it has failed in the meantime."""
        if self.open:
            self.engine.call(functools.partial(self.model.add, self, work))

    async def events(self) -> AsyncIterator[Event]:
        """Yield results until all sequences have ended.

        Raises:
            ApiError: the request failed.
        """
        left = self.count
        while left:
            event = await self._events.get()
            if isinstance(event, ApiError):
                raise event
            left -= _is_last(event)
            yield event

    def put(self, event: Event) -> None:
        """Take a result from the engine."""
        if not self.open:
            return  # cancelled in the meantime
        if not self._has_begun:
            self._has_begun = True
            self.engine.metrics.first_token.observe(self.loop.time() - self._begin)
        self._close(_is_last(event))
        self._events.put_nowait(event)

    def fail(self, error: ApiError) -> None:
        """End the request with an error."""
        self._events.put_nowait(error)
        self.cancel()

    def cancel(self) -> None:
        """Cancel the sequences that have not ended. May be called at any time."""
        if self.open:
            self._close(self.open)
            self.engine.call(functools.partial(self.model.drop, self))

    def _close(self, count: int) -> None:
        self.open -= count
        self.engine.in_flight -= count
        if not self.open:
            self._timer.cancel()


def request_timeout(seconds: float) -> ApiError:
    """The error of a request that did not end in time."""
    return ApiError(504, f"the request took longer than {seconds:g} seconds", code="timeout")


def _is_last(event: Event) -> bool:
    return not isinstance(event, TextDelta) or event.reason is not None


class ServedModel:
    """A model that an engine serves. The engine's thread calls its methods.

    Attributes:
        running: sequences that run, each with its request and its index in that.
    """

    def __init__(self, engine: ServingEngine, name: str, predictor: Predictor, tokenizer: Tokenizer) -> None:
        """The predictor must have its rows."""
        self.engine, self.name, self.predictor, self.tokenizer = engine, name, predictor, tokenizer
        self.running: dict[SequenceState, tuple[RequestHandle, int]] = {}
        self._batcher = Batcher(predictor, tokenizer)
        self._waiting: collections.deque[tuple[RequestHandle, int, Request | BeamSearchRequest]]
        self._waiting = collections.deque()

    @property
    def idle(self) -> bool:
        return not self._waiting and not self.running

    @property
    def num_running(self) -> int:
        """Number of sequences that have a row of the predictor."""
        return len(self._batcher.running)

    def add(self, handle: RequestHandle, work: Work) -> None:
        """Enqueue the sequences of a request."""
        requests: Sequence[Request | BeamSearchRequest] = (
            [work] if isinstance(work, BeamSearchRequest) else work
        )
        self._waiting += [(handle, index, request) for index, request in enumerate(requests)]

    def drop(self, handle: RequestHandle) -> None:
        """Cancel a request's sequences."""
        self._waiting = collections.deque(entry for entry in self._waiting if entry[0] is not handle)
        for sequence in [sequence for sequence, (owner, _) in self.running.items() if owner is handle]:
            self._batcher.cancel(sequence)
            del self.running[sequence]

    def open_requests(self) -> set[RequestHandle]:
        """Requests with sequences that run or wait."""
        return {handle for handle, *_ in self._waiting} | {handle for handle, _ in self.running.values()}

    def step(self) -> None:
        """Begin waiting requests, and generate a token for each running sequence."""
        self._admit()
        begin = time.perf_counter()
        deltas = []
        for sequence, text in self._batcher.step():
            handle, index = self.running[sequence]
            if sequence.reason == "error":
                del self.running[sequence]
                self.engine.fail(handle, ApiError(500, NOT_FINITE))
                continue
            delta = TextDelta(
                index,
                text,
                sequence.new[-1] if sequence.end_token is None else None,
                sequence.end_token,
                sequence.logprobs[-1] if sequence.logprobs else None,
                sequence.prompt_logprobs,
                sequence.reason,
            )
            deltas.append((handle, delta))
            if sequence.reason is not None:
                del self.running[sequence]
        if deltas:
            self.engine.deliver(deltas, time.perf_counter() - begin)

    def _admit(self) -> None:
        """Pass waiting requests to the batcher, up to a beam search, which waits until nothing runs."""
        while self._waiting:
            handle, index, request = self._waiting[0]
            if isinstance(request, BeamSearchRequest) and self.running:
                return
            self._waiting.popleft()
            try:
                if isinstance(request, BeamSearchRequest):
                    self._search(handle, request)
                else:
                    self.running[self._batcher.add(request)] = (handle, index)
            except NonFiniteLogits:
                self.engine.fail(handle, ApiError(500, NOT_FINITE))
            except InputError as error:  # no prompt is empty here, so it is too long
                code = "context_length_exceeded"
                self.engine.fail(handle, ApiError(400, str(error), param=handle.param, code=code))

    def _search(self, handle: RequestHandle, request: BeamSearchRequest) -> None:
        def check() -> None:
            if not handle.open or self.engine.is_late:
                raise _Cancelled

        with contextlib.suppress(_Cancelled):
            hypotheses = beam_search(
                self.predictor,
                request.prompt,
                request.config,
                length=request.length,
                ends=request.ends,
                check=check,
            )
            self.engine.deliver_beams(handle, hypotheses)
            return
        self.engine.fail(handle, ApiError(503, STOPPING))


class ServingEngine:
    """Generate for the requests of clients, in turn with each model.

    Call `run` on one thread; `reserve` and request handles belong to the event loop's thread.

    Attributes:
        models: by name.
        in_flight: sequences that run or wait. Used by the event loop.
        running: sequences that run.
    """

    def __init__(self, models: Mapping[str, tuple[Predictor, Tokenizer]], *, max_queue: int) -> None:
        """The predictors must have their rows."""
        self.models = {name: ServedModel(self, name, *model) for name, model in models.items()}
        self.metrics = Metrics()
        rows = sum(model.predictor.rows for model in self.models.values())
        self.capacity, self.in_flight, self.closing = rows + max_queue, 0, False
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deadline = math.inf

    @property
    def running(self) -> int:
        return sum(model.num_running for model in self.models.values())

    @property
    def is_late(self) -> bool:
        """True once the time to finish what runs when the server stops is over."""
        return time.monotonic() > self._deadline

    def reserve(self, model: ServedModel, count: int, timeout: float, param: str) -> RequestHandle:
        """Accept a request of `count` sequences, which must end within `timeout` seconds.

        Errors about prompts name the field `param`.

        Nothing that a request costs is spent before this call.

        Raises:
            ApiError: it has too many sequences, by itself or with those in flight; or the server is stopping.
        """
        if self.closing:
            raise ApiError(503, STOPPING)
        if count > self.capacity:
            raise ApiError(
                400,
                f"the request asks for {count} texts, and the server takes at most {self.capacity} at once",
            )
        if self.in_flight + count > self.capacity:
            raise ApiError(
                429,
                f"the server is busy with {self.in_flight} of {self.capacity} texts; try again later",
                headers={"Retry-After": "1"},
            )
        self.in_flight += count
        return RequestHandle(self, model, count, timeout, param)

    def stop(self, seconds: float) -> None:
        """Refuse new requests, and end when those in flight have ended, or after so many seconds.

        May be called from any thread and from signal handlers.
        """
        self._deadline, self.closing = time.monotonic() + seconds, True
        self.call(lambda: None)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the engine's thread, between two tokens."""
        self._calls.put(function)

    def run(self) -> None:
        """Compute until stopped. When it ends, for any reason, all open requests fail."""
        try:
            while True:
                while not self._calls.empty() or (self._idle and not self.closing):
                    self._calls.get()()
                if self.closing and (self._idle or self.is_late):
                    return
                for model in self.models.values():
                    if not model.idle:
                        model.step()
        finally:
            self.closing = True
            while not self._calls.empty():
                self._calls.get()()
            for model in self.models.values():
                for handle in model.open_requests():
                    self.fail(handle, ApiError(503, STOPPING))

    @property
    def _idle(self) -> bool:
        return all(model.idle for model in self.models.values())

    def deliver(self, deltas: list[tuple[RequestHandle, TextDelta]], seconds: float) -> None:
        """Send the results of a step that took so many seconds to the event loop."""
        self._call_on_loop(deltas[0][0], functools.partial(self._deliver, deltas, seconds))

    def deliver_beams(self, handle: RequestHandle, hypotheses: list[Hypothesis]) -> None:
        """Send the result of a beam search to the event loop."""
        self._call_on_loop(handle, functools.partial(self._deliver_beams, handle, hypotheses))

    def fail(self, handle: RequestHandle, error: ApiError) -> None:
        """End a request with an error."""
        self._call_on_loop(handle, functools.partial(handle.fail, error))

    def _deliver(self, deltas: list[tuple[RequestHandle, TextDelta]], seconds: float) -> None:
        tokens = sum(delta.token is not None for _, delta in deltas)
        self.metrics.generated_tokens += tokens
        self.metrics.token.observe(seconds, tokens)
        for handle, delta in deltas:
            handle.put(delta)

    def _deliver_beams(self, handle: RequestHandle, hypotheses: list[Hypothesis]) -> None:
        self.metrics.generated_tokens += sum(len(hypothesis.tokens) for hypothesis in hypotheses)
        handle.put(hypotheses)

    def _call_on_loop(self, handle: RequestHandle, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no client waits
            handle.loop.call_soon_threadsafe(call)


class _Cancelled(Exception):
    """The client no longer waits for a beam search."""
