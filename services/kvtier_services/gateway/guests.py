"""Sessions as the host sees them. Everything here runs on the door's loop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from kvtier.errors import ProtocolMismatch
from kvtier.hierarchy.cache import Hierarchy
from kvtier.rpc.conversions import unpack_keys
from kvtier.rpc.kvtier_pb2 import ClientNote

_log = logging.getLogger(__name__)

PATIENCE = 0.25
"""Seconds that a call waits for notes sent before it; they come on another stream of the same connection."""
GIVEN_UP_AT_MOST = 1024
REPORTS = frozenset(("bad_header", "bad_checksum"))
"""What clients report of blocks; anything else is counted under one name, which no client chooses."""


class Guest:
    """One session: the hierarchy's leases and tickets under the numbers that its client gave them.

    Attributes:
        session: its number.
        client: what it said of itself.
    """

    def __init__(self, hierarchy: Hierarchy, session: int, client: str) -> None:
        self._hierarchy = hierarchy
        self.session, self.client = session, client
        self._leases: dict[int, int] = {}
        self._tickets: dict[int, int] = {}
        self._given_up: dict[int, None] = {}
        self._heard = 0
        self._news = asyncio.Event()
        hierarchy.attach(session, client)

    def leave(self) -> None:
        """The stream has ended."""
        self._hierarchy.detach(self.session)

    def hear(self, note: ClientNote) -> None:
        """Do what a note on the stream says."""
        match note.WhichOneof("note"):
            case "release":
                self._release(note.release.call, note.release.seconds)
            case "abort":
                self._abort(note.abort.call)
            case "condemn":
                why = note.condemn.why if note.condemn.why in REPORTS else "client_report"
                self._hierarchy.condemn(unpack_keys(note.condemn.keys), why)
            case "refused":
                self._hierarchy.refused()
                _log.warning("device memory not attached session=%d reason=%r", self.session, note.refused.why[:300])
            case other:
                raise ProtocolMismatch(f"a session that has begun cannot say {other}")
        self._heard += 1
        self._news.set()

    async def caught_up(self, sent: int) -> None:
        """Wait until this many notes were heard, so that a call finds what its client released before it."""
        if self._heard >= sent:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while self._heard < sent:
                    self._news.clear()
                    await self._news.wait()

    def lease(self, call: int, lease: int) -> bool:
        """Book a lease; False when there is none, or its client has given it up already."""
        if call in self._given_up and lease:
            self._hierarchy.release(lease)
            return False
        if lease:
            self._leases[call] = lease
        return bool(lease)

    def ticket(self, call: int, ticket: int) -> bool:
        """Book a reservation; False when there is none, or its client has given it up already."""
        if call in self._given_up and ticket:
            self._hierarchy.commit(self.session, ticket, [])
            return False
        if ticket:
            self._tickets[call] = ticket
        return bool(ticket)

    def end_ticket(self, call: int) -> int:
        """Strike a reservation out; its number with the hierarchy, 0 when it is not known."""
        return self._tickets.pop(call, 0)

    def _release(self, call: int, seconds: float) -> None:
        lease = self._leases.pop(call, 0)
        if lease:
            self._hierarchy.release(lease, seconds)
        else:
            self._give_up(call)

    def _abort(self, call: int) -> None:
        ticket = self.end_ticket(call)
        if ticket:
            self._hierarchy.commit(self.session, ticket, [])
        else:
            self._give_up(call)

    def _give_up(self, call: int) -> None:
        """The client wants nothing of this call; it may still be under way here."""
        self._given_up[call] = None
        if len(self._given_up) > GIVEN_UP_AT_MOST:
            del self._given_up[next(iter(self._given_up))]
