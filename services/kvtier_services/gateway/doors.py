"""The doors of a host together."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from kvtier.errors import ConfigError
from kvtier_services.gateway.calls import Tally
from kvtier_services.gateway.control import Door
from kvtier_services.gateway.remote import RemoteDoor

_log = logging.getLogger(__name__)

RETRY = 1.0
"""Seconds until a remote door that could not be opened is tried again."""


class Doors:
    """One for the engines of this host, one for clients of others, which may fail to open without shutting the first.

    Attributes:
        fault: why the second is shut; empty when it is not.
    """

    def __init__(self, front: Door, side: RemoteDoor) -> None:
        self._front, self._side = front, side
        self._opening: asyncio.Task[None] | None = None
        self.fault = ""

    @property
    def tally(self) -> Tally:
        """What came through both."""
        return self._front.tally + self._side.tally

    def remote(self) -> dict[str, Any]:
        """What the remote door says of itself."""
        status = self._side.status()
        return status | {"faults": [fault for fault in (self.fault, *status["faults"]) if fault]}

    async def start(self) -> None:
        """Open the first, and the second as soon as that works."""
        await self._front.start()
        await self._open()
        if self.fault:
            self._opening = asyncio.create_task(self._until_open())

    async def stop(self) -> None:
        """Shut both."""
        if self._opening is not None:
            self._opening.cancel()
            with suppress(asyncio.CancelledError):
                await self._opening
        await asyncio.gather(self._front.stop(), self._side.stop())

    async def _open(self) -> None:
        try:
            await self._side.start()
            self.fault = ""
        except ConfigError as exc:
            if str(exc) != self.fault:
                _log.error("remote door shut: %s", exc)
            self.fault = str(exc)

    async def _until_open(self) -> None:
        while self.fault:
            await asyncio.sleep(RETRY)
            await self._open()
