"""Who holds which leases and reservations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier.block import slot_nbytes
from kvtier.errors import SessionUnavailable
from kvtier.tiers.base import TierNumber

T = TypeVar("T")

PEERS = 1 << 32
"""Sessions from this number on are other hosts that are lent blocks; a client's are below."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Slots pinned for one reader; of blocks that are read in the GPU tier's memory, the keys.

    Attributes:
        session: whose it is.
        offsets: of slots in the arena.
        inside: blocks that are read in the GPU tier's memory.
        nbytes: of all the slots.
        since: when it began.
        inside_nbytes: of those in the GPU tier's memory.
    """

    session: int
    offsets: NDArray[np.int64]
    inside: Sequence[bytes]
    nbytes: int
    since: float
    inside_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Pin:
    """The slot of one block that stays in the CPU tier until a time comes; `space` is the number of its keyspace."""

    offset: int
    nbytes: int
    until: float
    owner: str
    space: int


STUCK = 10.0
"""Seconds after which a lease or a reservation is stuck, or its engine is."""


@dataclass(frozen=True, slots=True)
class Held:
    """Something that keeps slots from others, for people.

    Attributes:
        kind: "lease", "reservation" or "pin".
        owner: what its client says of itself.
        age: seconds since it began; of a pin, seconds until it ends, negative.
        nbytes: of the slots.
        stuck: whether it is older than `STUCK` seconds; a pin never is.
    """

    kind: str
    owner: str
    age: float
    nbytes: int
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Reservation:
    """Slots that one session may write into: for each grant its key, offset, generation and payload bytes."""

    session: int
    keys: list[bytes]
    offsets: list[int]
    generations: list[int]
    nbytes: list[int]
    positions: list[int]
    """Place of each grant in the call that reserved it."""
    ancestor: bytes | None
    """Key of the block before the first key of that call."""
    asked: list[bytes]
    """All keys of that call."""
    since: float

    @property
    def held_nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(map(slot_nbytes, self.nbytes))


@dataclass(slots=True)
class Holdings:
    """What one session holds; `owner` is what its client says of itself."""

    owner: str = ""
    leases: set[int] = field(default_factory=set)
    tickets: set[int] = field(default_factory=set)
    leased_nbytes: int = 0
    reserved_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Leases, reservations and pins of one moment.

    Attributes:
        owners: what the client of each session says of itself.
        leases, reservations, pins: that there were.
        pinned_nbytes: of the slots that are pinned.
    """

    owners: Mapping[int, str]
    leases: Sequence[Lease]
    reservations: Sequence[Reservation]
    pins: Sequence[Pin]
    pinned_nbytes: int

    @property
    def leased(self) -> dict[TierNumber, int]:
        """Bytes of leased slots, once for each lease, by the tier whose memory they are in."""
        inside = sum(lease.inside_nbytes for lease in self.leases)
        return {TierNumber.GPU: inside, TierNumber.CPU: sum(lease.nbytes for lease in self.leases) - inside}

    def oldest(self, now: float) -> dict[str, float]:
        """Age of the oldest lease and reservation; 0 where there is none."""
        return {kind: max([now - since for since in times], default=0.0) for kind, times in self._begun().items()}

    def stuck(self, now: float) -> dict[str, int]:
        """Leases and reservations that are older than `STUCK` seconds."""
        return {kind: sum(now - since > STUCK for since in times) for kind, times in self._begun().items()}

    def held(self, now: float) -> list[Held]:
        """Leases and reservations, the oldest first, and then one pin for each owner."""
        everything = [
            *(("lease", one.session, one.since, one.nbytes) for one in self.leases),
            *(("reservation", one.session, one.since, one.held_nbytes) for one in self.reservations),
        ]
        everything.sort(key=lambda one: one[2])
        held = [
            Held(kind, self.owners[session], now - since, n, now - since > STUCK)
            for kind, session, since, n in everything
        ]
        pins: dict[str, tuple[float, int]] = {}
        for pin in self.pins:
            until, nbytes = pins.get(pin.owner, (0.0, 0))
            pins[pin.owner] = max(until, pin.until), nbytes + pin.nbytes
        return held + [Held("pin", owner, now - until, nbytes) for owner, (until, nbytes) in pins.items()]

    def _begun(self) -> dict[str, list[float]]:
        return {
            "lease": [lease.since for lease in self.leases],
            "reservation": [reservation.since for reservation in self.reservations],
        }


class Ledger:
    """Sessions and what they hold. Not thread-safe.

    Attributes:
        pins: by the keys of the blocks; `pin` and `unpin` change them.
        pinned: bytes of their slots, by the number of the keyspace.
    """

    def __init__(self) -> None:
        self.sessions: dict[int, Holdings] = {}
        self.leases: dict[int, Lease] = {}
        self.reservations: dict[int, Reservation] = {}
        self.writing: set[bytes] = set()
        self.pins: dict[bytes, Pin] = {}
        self.pinned: Counter[int] = Counter()
        self._next = 1

    def of(self, session: int) -> Holdings:
        """What a session holds.

        Raises:
            SessionUnavailable: it is not attached; the client attaches again.
        """
        try:
            return self.sessions[session]
        except KeyError:
            raise SessionUnavailable(
                f"session {session} is not attached to this host (it may have restarted)"
            ) from None

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of the slots that are pinned."""
        return self.pinned.total()

    def snapshot(self) -> Snapshot:
        """What is held now, to be summed up without the lock."""
        owners = {number: holdings.owner for number, holdings in self.sessions.items()}
        leases, reservations = list(self.leases.values()), list(self.reservations.values())
        return Snapshot(owners, leases, reservations, list(self.pins.values()), self.pinned_nbytes)

    def pin(self, key: bytes, pin: Pin) -> None:
        """Book a pin, in place of that which the block has."""
        self.unpin(key)
        self.pins[key] = pin
        self.pinned[pin.space] += pin.nbytes

    def unpin(self, key: bytes) -> Pin | None:
        """Strike a pin out; None when there is none."""
        pin = self.pins.pop(key, None)
        if pin is not None:
            self.pinned[pin.space] -= pin.nbytes
        return pin

    def lease(self, lease: Lease) -> int:
        """Book a lease; returns its number."""
        holdings = self.of(lease.session)
        number = self._number()
        self.leases[number] = lease
        holdings.leases.add(number)
        holdings.leased_nbytes += lease.nbytes
        return number

    def end_lease(self, number: int) -> Lease | None:
        """Strike a lease out; None when it is unknown (already released)."""
        lease = self.leases.pop(number, None)
        if lease is not None:
            holdings = self.sessions[lease.session]
            holdings.leases.discard(number)
            holdings.leased_nbytes -= lease.nbytes
        return lease

    def reserve(self, reservation: Reservation) -> int:
        """Book a reservation; returns its ticket."""
        holdings = self.of(reservation.session)
        ticket = self._number()
        self.reservations[ticket] = reservation
        self.writing.update(reservation.keys)
        holdings.tickets.add(ticket)
        holdings.reserved_nbytes += reservation.held_nbytes
        return ticket

    def reservation(self, ticket: int, session: int) -> Reservation | None:
        """A session's reservation; None when it has none of that ticket."""
        reservation = self.reservations.get(ticket)
        return reservation if reservation is not None and reservation.session == session else None

    def end_reservation(self, ticket: int, session: int) -> Reservation | None:
        """Strike a reservation out; None when this session has none of that ticket."""
        reservation = self.reservation(ticket, session)
        if reservation is None:
            return None
        del self.reservations[ticket]
        self.writing.difference_update(reservation.keys)
        holdings = self.sessions[session]
        holdings.tickets.discard(ticket)
        holdings.reserved_nbytes -= reservation.held_nbytes
        return reservation

    def attach(self, session: int, owner: str) -> None:
        """A session begins."""
        self.sessions.setdefault(session, Holdings(owner))

    def detach(self, session: int) -> tuple[list[Lease], list[Reservation]]:
        """A session ends; what it held is struck out and returned."""
        holdings = self.sessions.get(session)
        if holdings is None:
            return [], []
        leases = _present(self.end_lease(number) for number in list(holdings.leases))
        reservations = _present(self.end_reservation(ticket, session) for ticket in list(holdings.tickets))
        del self.sessions[session]
        return leases, reservations

    def _number(self) -> int:
        self._next += 1
        return self._next


def _present(things: Iterable[T | None]) -> list[T]:
    return [thing for thing in things if thing is not None]
