"""Connections that slow clients cannot hold open: uvicorn itself waits for them forever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS = 10.0


class Connection(H11Protocol):
    """A connection that is cut when nothing has moved from one check to the next.

    That is the case while a request's header does not arrive, and while the client does not read
    the response. The application limits the time for the body.
    """

    idle_seconds = IDLE_SECONDS  # between checks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to watch."""
        super().connection_made(transport)
        self._last_state: tuple[Any, ...] = ()
        self._watch = self.loop.call_later(self.idle_seconds, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to watch."""
        self._watch.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        unsent = self.transport.get_write_buffer_size()
        state = (self.cycle, unsent)
        if state == self._last_state and (unsent or not is_answering):
            self.transport.abort()
            return
        self._last_state = state
        self._watch = self.loop.call_later(self.idle_seconds, self._check)
