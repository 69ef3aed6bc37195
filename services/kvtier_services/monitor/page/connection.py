"""One connection to the status page."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 10.0
"""Seconds within which one who connects must have asked for something, whole."""


class Connection(H11Protocol):
    """HTTP with one who connects; whoever asks for nothing, or in drops, is cut off.

    uvicorn waits for a request as long as it takes, and answers 503 to all when very many wait: without a token
    everybody could then keep out everybody.
    """

    _looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Let it in, unless there are far too many: each takes a file of the controller's process."""
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > 2 * self.limit_concurrency:
            transport.abort()
        else:
            self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        self._looking = self.loop.call_later(PATIENCE, self._look, self.cycle)

    def _look(self, last: Any) -> None:
        """Whether there was a request after the last one, or that is still being answered."""
        cycle: Any = self.cycle  # of the newest request; None before the first
        if cycle is last and (cycle is None or cycle.response_complete):
            self.transport.abort()
        else:
            self._look_again()
