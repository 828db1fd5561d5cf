"""HTTP/1.1 with limits on connections and on slow clients."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds in which the head of a request must arrive, and in which a client must read more of a response.
HEAD_SECONDS, WRITE_SECONDS = 10, 60


def max_connections() -> int:
    """Maximum number of open connections: half of the file descriptors that the process may open, at most 1,024."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else min(soft // 2, 1024)


class LimitedProtocol(H11Protocol):
    """A connection, which is closed if there are too many, or if its client sends or reads too slowly."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            transport.abort()
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.head_timer, self.write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.write_timer is not None:
            self.write_timer.cancel()

    def _watch_head(self) -> None:
        """Close the connection in time unless the head of the next request is complete."""
        if self.conn.their_state is not h11.IDLE:
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)
