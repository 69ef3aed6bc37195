"""Sessions as the host sees them. Everything here runs on the door's loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvtier.block import ADDRESS_NBYTES
from kvtier.errors import ProtocolMismatch, UsageError
from kvtier.hierarchy import streaming
from kvtier.hierarchy.cache import Hierarchy
from kvtier.rpc.conversions import unpack_keys
from kvtier.rpc.kvtier_pb2 import ClientNote, Release
from kvtier_services.gateway.callers import ENGINE, Caller

_log = logging.getLogger(__name__)

PATIENCE = 0.25
"""Seconds that a call waits for notes sent before it; they come on another stream of the same connection."""
GIVEN_UP_AT_MOST = 1024
REPORTS = frozenset(("bad_header", "bad_checksum"))
"""What clients report of blocks; anything else is counted under one name, which no client chooses."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A reservation, and what came for it over the network.

    Attributes:
        number: with the hierarchy.
        received: positions whose payload arrived whole.
        receiving: whether bytes are on their way into its slots.
        void: whether it is to be given back as soon as they are not.
    """

    number: int
    received: set[int] = field(default_factory=set)
    receiving: bool = False
    void: bool = False


class Guest:
    """One session: the hierarchy's leases and tickets under the numbers that its client gave them.

    Belongs to the door's loop, but for `lease_of` and `receiving`, which bulk calls use on threads of theirs.

    Attributes:
        session: its number.
        client: what it said of itself.
        caller: whose it is.
    """

    def __init__(self, hierarchy: Hierarchy, session: int, client: str, caller: Caller = ENGINE) -> None:
        self._hierarchy = hierarchy
        self.session, self.client, self.caller = session, client, caller
        self._leases: dict[int, int] = {}
        self._tickets: dict[int, Ticket] = {}
        self._lock = threading.Lock()
        self._given_up: dict[int, None] = {}
        self._heard = 0
        self._news = asyncio.Event()
        self._looking: asyncio.Future[None] | None = None
        hierarchy.attach(session, f"{caller.tenant.name}: {client}" if caller.tenant is not None else client)

    def leave(self) -> None:
        """The stream has ended. A bulk call that begins just now finds nothing any more, and so holds no thread."""
        with self._lock:
            self._leases.clear()
            self._tickets.clear()
        self._hierarchy.detach(self.session)

    def hear(self, note: ClientNote) -> None:
        """Do what a note on the stream says."""
        match note.WhichOneof("note"):
            case "release":
                self._release(note.release)
            case "abort":
                self._abort(note.abort.call)
            case "condemn":
                why = note.condemn.why if note.condemn.why in REPORTS else "client_report"
                self._condemn(note.condemn.keys, why)
            case "claim":
                if self.caller.tenant is not None:
                    self.caller.tenant.claim(note.claim.keyspace)
            case "refused":
                self._refused(note.refused.why)
            case other:
                raise ProtocolMismatch(f"a session that has begun cannot say {other}")
        self._heard += 1
        self._news.set()

    def _refused(self, why: str) -> None:
        """Device memory could not be attached; clients of other hosts never can."""
        if self.caller is ENGINE:
            self._hierarchy.refused()
            _log.warning("device memory not attached session=%d reason=%r", self.session, why[:300])

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
            self._tickets[call] = Ticket(ticket)
        return bool(ticket)

    def end_ticket(self, call: int) -> Ticket | None:
        """Strike a reservation out; None when it is not known.

        Raises:
            UsageError: bytes are on their way into it.
        """
        with self._lock:
            ticket = self._tickets.get(call)
            if ticket is not None and ticket.receiving:
                raise UsageError(
                    f"payloads of reservation {call} are still on their way; commit when they have arrived"
                )
            return self._tickets.pop(call, None)

    def lease_of(self, call: int) -> int:
        """The hierarchy's number of a lease; 0 when there is none. Thread-safe."""
        return self._leases.get(call, 0)

    @contextmanager
    def receiving(self, call: int) -> Iterator[Ticket]:
        """Bytes are on their way into a reservation's slots; until then nobody else gets those. Thread-safe.

        Raises:
            UsageError: there is no such reservation, or others are.
        """
        with self._lock:
            ticket = self._tickets.get(call)
            if ticket is None or ticket.receiving:
                raise UsageError(f"there is no reservation {call} that payloads can be sent for now")
            ticket.receiving = True
        try:
            yield ticket
        finally:
            with self._lock:
                ticket.receiving = False
                void = ticket.void and self._tickets.pop(call, None) is not None
            if void:
                self._hierarchy.commit(self.session, ticket.number, [])

    def _condemn(self, packed: bytes, why: str) -> None:
        """A client found wrong bytes. One that may not evict is not believed: it may drop nothing that is whole."""
        if self.caller.admin:
            self._hierarchy.condemn(unpack_keys(packed), why)
            return
        keys = self.caller.own(self._hierarchy, unpack_keys(packed[:ADDRESS_NBYTES]))
        if keys and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().run_in_executor(None, self._drop_if_broken, keys[0], why)

    def _drop_if_broken(self, key: bytes, why: str) -> None:
        if streaming.is_broken(self._hierarchy.state, key):
            self._hierarchy.condemn([key], why)

    def _release(self, note: Release) -> None:
        lease = self._leases.pop(note.call, 0)
        if lease:
            # Others are told by it what is worth loading; a tenant may say anything.
            self._hierarchy.release(lease, note.seconds if self.caller.admin else 0.0, note.part)
        else:
            self._give_up(note.call)

    def _abort(self, call: int) -> None:
        with self._lock:
            ticket = self._tickets.get(call)
            if ticket is not None and ticket.receiving:
                ticket.void = True
                return
            self._tickets.pop(call, None)
        if ticket is not None:
            self._hierarchy.commit(self.session, ticket.number, [])
        else:
            self._give_up(call)

    def _give_up(self, call: int) -> None:
        """The client wants nothing of this call; it may still be under way here."""
        self._given_up[call] = None
        if len(self._given_up) > GIVEN_UP_AT_MOST:
            del self._given_up[next(iter(self._given_up))]
