"""Payloads to and from clients of other hosts, by Arrow Flight.

Calls run on Flight's threads, not on the door's loop.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.block import verify_payload
from kvtier.errors import ConfigError, CorruptPayload, KVTierError, ProtocolMismatch, UsageError
from kvtier.hierarchy import streaming
from kvtier.hierarchy.cache import Hierarchy
from kvtier.hierarchy.streaming import Place
from kvtier.rpc.bulk import COLUMN, PIECE, POSITION, Ask
from kvtier.rpc.conversions import pack_numbers
from kvtier_services.gateway.arrow import flight
from kvtier_services.gateway.arrow import pyarrow as pa
from kvtier_services.gateway.callers import Caller
from kvtier_services.gateway.connections import hang_up, thin_out
from kvtier_services.gateway.guests import Guest, Ticket
from kvtier_services.gateway.register import Register, bearer
from kvtier_services.gateway.tls import Pem

_log = logging.getLogger(__name__)

SCHEMA = pa.schema([pa.field(COLUMN, pa.uint8(), nullable=False)])
STREAMS = 32
"""Bulk calls at a time; each takes a thread."""
STREAMS_OF_ONE = 8
"""Of one tenant."""
_CALLER = "caller"


class Desk:
    """What bulk calls share with the door: who is known, whose sessions there are, and what is under way. Thread-safe.

    Args:
        hierarchy: of the host.
        register: who is known.
        guests: sessions of the remote door, by number.

    Attributes:
        counters: what came of bulk calls, by reason; bytes in and out.
    """

    def __init__(self, hierarchy: Hierarchy, register: Register, guests: Mapping[int, Guest]) -> None:
        self.hierarchy, self.register = hierarchy, register
        self.counters: Counter[str] = Counter()
        self._guests = guests
        self._lock = threading.Lock()
        self._streams: Counter[str] = Counter()
        self._writing: Counter[int] = Counter()
        self._peers: Counter[tuple[int, str]] = Counter()

    def begin(self, caller: Caller) -> None:
        """A bulk call begins.

        Raises:
            FlightUnavailableError: there are too many.
        """
        tenant = caller.tenant.name if caller.tenant is not None else ""
        with self._lock:
            if self._streams[tenant] >= STREAMS_OF_ONE or self._streams.total() >= STREAMS:
                self.counters["busy"] += 1
                raise flight.FlightUnavailableError("too many bulk calls at a time; try again")
            self._streams[tenant] += 1

    def end(self, caller: Caller) -> None:
        """A bulk call has ended."""
        with self._lock:
            self._streams[caller.tenant.name if caller.tenant is not None else ""] -= 1

    def guest(self, session: int, caller: Caller) -> Guest:
        """The session that a bulk call names, if it is its caller's.

        Raises:
            UsageError: it is not.
        """
        guest = self._guests.get(session)
        if guest is None or guest.caller is not caller:
            raise UsageError(f"session {session} is not attached here")
        return guest

    def busy(self, session: int) -> bool:
        """Whether bytes are being put into slots that this session had reserved."""
        with self._lock:
            return self._writing[session] > 0

    def serving(self, session: int, peer: str) -> _Counted:
        """While a call of a session uses a connection, which is cut when the session ends."""
        return _Counted(self._peers, (session, peer), self._lock)

    def writing(self, session: int) -> _Counted:
        """While bytes are put into a session's slots."""
        return _Counted(self._writing, session, self._lock)

    def left(self, session: int, port: int) -> None:
        """A session has ended: what its calls still send or await is cut off."""
        with self._lock:
            used = [peer for whose, peer in self._peers if whose == session]
        for peer in used:
            hang_up(peer, port)

    def thin_out(self, port: int, most: int) -> None:
        """Cut off connections that no call uses, if there are too many."""
        with self._lock:
            used = [peer for _, peer in self._peers]
        self.counters["cut"] += thin_out(port, used, most)

    def cut(self, port: int) -> None:
        """Cut all calls off."""
        with self._lock:
            used = [peer for _, peer in self._peers]
        for peer in used:
            hang_up(peer, port)


class _Counted:
    """Counts while it lasts."""

    def __init__(self, counts: Counter[Any], what: Any, lock: threading.Lock) -> None:
        self._counts, self._what, self._lock = counts, what, lock

    def __enter__(self) -> None:
        with self._lock:
            self._counts[self._what] += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._counts[self._what] -= 1
            if not self._counts[self._what]:
                del self._counts[self._what]


class BulkServer(flight.FlightServerBase):  # type: ignore[misc]
    """The bulk service at one address; it serves from its making until `shutdown`.

    Args:
        host, port: where to listen; port 0 for any free one.
        desk: what it shares with the door.
        pem: certificates; None for plain text.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, host: str, port: int, desk: Desk, pem: Pem | None) -> None:
        self._desk = desk
        proof: dict[str, Any] = {"tls_certificates": [(pem.cert, pem.key)]} if pem is not None else {}
        if pem is not None and pem.client_ca:
            proof |= {"verify_client": True, "root_certificates": pem.client_ca}
        place = f"{'grpc+tls' if pem is not None else 'grpc'}://{host}:{port}"
        try:
            super().__init__(place, middleware={_CALLER: _Doorkeeper(desk)}, **proof)
        except pa.ArrowException as exc:
            raise ConfigError(f"cannot listen on {host}:{port} for bulk: {exc}; set remote.bulk_port") from exc

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.GeneratorStream:
        """Send payloads of leased slots, straight from the arena."""
        ask, guest = self._asked(context, ticket.ticket)
        lease = guest.lease_of(ask.call)
        if not lease:
            raise flight.FlightServerError(f"there is no lease {ask.call} here")
        return flight.GeneratorStream(SCHEMA, self._payloads(context.peer(), guest, lease, ask))

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        """Take payloads for reserved slots; each is verified before it is put there."""
        ask, guest = self._asked(context, descriptor.command or b"")
        if reader.schema != SCHEMA:
            raise flight.FlightServerError(f"payloads come as one column of bytes called {COLUMN}")
        try:
            with self._desk.serving(guest.session, context.peer()), guest.receiving(ask.call) as ticket:
                arrived = list(self._arrivals(guest, ticket, reader))
        except UsageError as exc:
            raise flight.FlightServerError(str(exc)) from exc
        except pa.ArrowException as exc:  # Flight would say all of the traceback
            self._desk.counters["unreadable"] += 1
            raise flight.FlightServerError("payloads cannot be read: they come as they are, not compressed") from exc
        writer.write(pa.py_buffer(pack_numbers(arrived)))

    def _asked(self, context: flight.ServerCallContext, packed: bytes) -> tuple[Ask, Guest]:
        caller = context.get_middleware(_CALLER).caller
        try:
            ask = Ask.unpack(packed)
            return ask, self._desk.guest(ask.session, caller)
        except (ProtocolMismatch, UsageError) as exc:
            self._desk.counters["refused"] += 1
            raise flight.FlightServerError(str(exc)) from exc

    def _payloads(self, peer: str, guest: Guest, lease: int, ask: Ask) -> Iterator[pa.RecordBatch]:
        desk, memory = self._desk, self._desk.hierarchy.arena.memory
        with desk.serving(guest.session, peer):
            for position in ask.positions:
                place = streaming.hold(desk.hierarchy.state, lease, position)
                if place is None:
                    return
                if not guest.caller.may_have(place.space):
                    desk.counters["foreign"] += 1
                    streaming.let_go(desk.hierarchy.state, place.offset)
                    return
                payload = memory[place.offset : place.offset + place.nbytes].view()
                payload.flags.writeable = False
                # The slot is kept until Flight has sent the last byte of it, whatever becomes of lease and session.
                weakref.finalize(payload, streaming.let_go, desk.hierarchy.state, place.offset).atexit = False
                buffer = pa.py_buffer(payload)
                del payload
                desk.counters["sent_nbytes"] += place.nbytes
                for start in range(0, place.nbytes, PIECE):
                    piece = buffer.slice(start, min(PIECE, place.nbytes - start))
                    column = pa.Array.from_buffers(pa.uint8(), piece.size, [None, piece])
                    yield pa.RecordBatch.from_arrays([column], schema=SCHEMA)

    def _arrivals(self, guest: Guest, ticket: Ticket, reader: flight.MetadataRecordBatchReader) -> Iterator[int]:
        """Put payloads into their slots as they come; the positions of those that did."""
        coming = _Coming(-1, None, np.empty(0, np.uint8))
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            metadata = chunk.app_metadata
            if metadata is None or metadata.size != POSITION.size or chunk.data is None:
                raise flight.FlightServerError("a payload comes with its position, as u32")
            (position,) = POSITION.unpack(metadata.to_pybytes())
            if position != coming.position:
                coming = self._expect(guest, ticket, position, coming.scratch)
            if not coming.take(chunk.data):
                continue
            with self._desk.writing(guest.session):
                why = self._receive(guest, ticket, coming)
            self._desk.counters[why or "received"] += 1
            if not why:
                self._desk.counters["received_nbytes"] += coming.filled
                yield position

    def _expect(self, guest: Guest, ticket: Ticket, position: int, scratch: NDArray[np.uint8]) -> _Coming:
        place = streaming.places(self._desk.hierarchy.state, guest.session, ticket.number).get(position)
        if place is None or position in ticket.received:
            self._desk.counters["not_reserved"] += 1
            return _Coming(position, None, scratch)
        return _Coming(position, place, scratch if scratch.nbytes >= place.nbytes else np.empty(place.nbytes, np.uint8))

    def _receive(self, guest: Guest, ticket: Ticket, coming: _Coming) -> str:
        """Put one payload into its slot; why not, or empty."""
        # Asked again, now that whoever takes reservations away waits for what is being written.
        place = streaming.places(self._desk.hierarchy.state, guest.session, ticket.number).get(coming.position)
        if place is None or ticket.void:
            return "not_reserved"
        # What is verified is a copy of its own, which the sender cannot change any more.
        payload = coming.scratch[: coming.filled]
        try:
            _verify(guest.caller, place, payload.data)
        except CorruptPayload as exc:
            _log.debug("payload refused session=%d reason=%s", guest.session, exc)
            return "corrupt"
        except KVTierError:
            return "foreign"
        self._desk.hierarchy.arena.memory[place.offset : place.offset + place.nbytes] = payload
        ticket.received.add(coming.position)
        return ""


@dataclass(slots=True)
class _Coming:
    """A payload of which pieces are coming; `place` is None when it is not taken, `scratch` has room for it."""

    position: int
    place: Place | None
    scratch: NDArray[np.uint8]
    filled: int = 0

    def take(self, batch: pa.RecordBatch) -> bool:
        """One more piece; whether the payload is whole now."""
        try:
            piece = _bytes_of(batch)
        except (CorruptPayload, pa.ArrowException):
            self.place = None
        if self.place is None or self.filled + len(piece) > self.place.nbytes:
            self.place = None
            return False
        self.scratch[self.filled : self.filled + len(piece)] = np.frombuffer(piece, np.uint8)
        self.filled += len(piece)
        return len(piece) > 0 and self.filled == self.place.nbytes


def _bytes_of(batch: pa.RecordBatch) -> memoryview:
    """The bytes of a batch, once it is proved that it has them."""
    batch.validate(full=True)
    column = batch.column(0)
    if column.null_count or column.offset:
        raise CorruptPayload("a payload has no nulls")
    return memoryview(column.buffers()[1] or b"")[: batch.num_rows]


def _verify(caller: Caller, place: Place, payload: memoryview) -> None:
    """See that this is the block that the slot was reserved for, and in a keyspace of who sent it.

    Raises:
        CorruptPayload: it is not whole, or another block, or of another size.
        Unauthenticated: the keyspace is not its tenant's.
    """
    header = verify_payload(payload, expected=place.key)
    if not len(payload) == header.payload_nbytes == place.nbytes:
        raise CorruptPayload(f"{len(payload)} bytes came for a slot of {place.nbytes}")
    if not caller.may_have(header.space):
        caller.needs_admin("saving into another tenant's keyspace")


class _Call(flight.ServerMiddleware):  # type: ignore[misc]
    """One bulk call of a known caller."""

    def __init__(self, caller: Caller, ended: Callable[[Caller], None]) -> None:
        self.caller = caller
        self._ended = ended

    def call_completed(self, exception: Exception | None) -> None:
        """Count it out."""
        self._ended(self.caller)


class _Doorkeeper(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets in who has a token; called before anything of a call is read."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, list[Any]]) -> _Call:
        """See who calls."""
        said = ((name.lower(), value) for name, values in headers.items() for value in values)
        try:
            caller = self._desk.register.caller(bearer(said))
        except KVTierError as exc:
            self._desk.counters["unauthenticated"] += 1
            raise flight.FlightUnauthenticatedError(str(exc)) from exc
        if info.method not in (flight.FlightMethod.DO_GET, flight.FlightMethod.DO_PUT):
            raise flight.FlightUnauthorizedError("this service knows DoGet and DoPut")
        self._desk.begin(caller)
        return _Call(caller, self._desk.end)
