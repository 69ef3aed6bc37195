"""Memory of a client on another host: slots at the same offsets as in the arena, as far as it holds them."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.block import PAGE, slot_nbytes, verify_payload
from kvtier.errors import CorruptPayload, ProtocolMismatch, SessionError, SessionUnavailable
from kvtier.hierarchy.answers import GrantState
from kvtier.rpc.bulk import MOST, Ask
from kvtier.rpc.kvtier_pb2 import Welcome

STALL = 5.0
"""Seconds that a load waits for its next block before it goes on without."""
STREAMS = 4
"""Loads that are on their way at a time."""
_NORESERVE = 0x4000


class Carrier(Protocol):
    """Carries payloads: see `Bulk`."""

    def get(self, ask: Ask, nbytes: int) -> Generator[memoryview]:
        """See `Bulk`."""
        ...

    def put(self, ask: Ask, payloads: Sequence[tuple[int, NDArray[np.uint8]]]) -> list[int]:
        """See `Bulk`."""
        ...

    def close(self) -> None:
        """See `Bulk`."""
        ...


@dataclass(slots=True, eq=False)
class _Slot:
    """A leased slot: its block, how many leases are on it, and whether its bytes are here."""

    key: bytes
    offset: int
    nbytes: int
    generation: int
    leases: int = 0
    here: bool = False


class StagedMemory:
    """`Memory` that has nothing but address space until slots are leased or written: bytes come and go with them.

    Slots keep their offsets and generations, so that decoding, encoding and their checks are those of a mapped arena.
    What is leased and what is written lie apart. Payloads are verified as they arrive.

    Args:
        welcome: what the host says of its arena.
        carrier: brings payloads; closed with this.
        clock: monotonic seconds.

    Raises:
        SessionUnavailable: there is no address space for it.
    """

    def __init__(self, welcome: Welcome, carrier: Carrier, clock: Callable[[], float] = time.monotonic) -> None:
        pages = welcome.capacity // PAGE
        self._carrier, self._clock = carrier, clock
        self._session = 0
        self._here, memory = _space(pages * PAGE)
        self._mine, self._writable = _space(pages * PAGE)
        _, generations = _space(-(-pages * 4 // PAGE) * PAGE)
        self._memory, self._generations = memory, generations.view(np.uint32)[:pages]
        self.readable, self.generations = _read_only(memory), _read_only(self._generations)
        self._threads = ThreadPoolExecutor(STREAMS, "kvtier-fetch")
        self._news = threading.Condition()
        self._slots: dict[int, _Slot] = {}
        self._leases: dict[int, list[_Slot]] = {}
        self._flying: set[int] = set()
        self._tickets: dict[int, dict[int, tuple[int, int]]] = {}
        self._closed = False

    def writable(self) -> NDArray[np.uint8]:
        return self._writable

    def is_of(self, welcome: Welcome) -> bool:
        return False

    def begin(self, session: int) -> None:
        self._session = session

    def leased(self, lease: int, keys: Sequence[bytes], slots: NDArray[Any]) -> None:
        self._check(slots["offset"], slots["nbytes"])
        with self._news:
            held = []
            for key, (offset, generation, nbytes) in zip(keys, slots.tolist(), strict=False):
                slot = self._slots.get(offset)
                if slot is None or slot.generation != generation:
                    slot = self._slots[offset] = _Slot(key, offset, nbytes, generation)
                    self._generations[offset // PAGE] = generation
                slot.leases += 1
                held.append(slot)
            self._leases[lease] = held

    def fetch(self, lease: int, first: int, end: int) -> int:
        with self._news:
            held = self._leases.get(lease, [])[first:end]
            if not held:
                return 0
            began = held[0].here or self._begin(lease, first, end)
            until = self._clock() + STALL
            while not held[0].here and self._clock() < until and not self._closed:
                if lease not in self._flying:
                    if began:
                        return 0
                    began = self._begin(lease, first, end)
                self._news.wait(until - self._clock())
            return next((i for i, slot in enumerate(held) if not slot.here), len(held))

    def released(self, lease: int) -> None:
        with self._news:
            for slot in self._leases.pop(lease, []):
                slot.leases -= 1
                if not slot.leases and self._slots.get(slot.offset) is slot:
                    del self._slots[slot.offset]
                    self._generations[slot.offset // PAGE] += np.uint32(1)
                    _forget(self._here, slot.offset, slot.nbytes)

    def reserved(self, ticket: int, nbytes: Sequence[int], grants: NDArray[Any]) -> None:
        granted = np.flatnonzero(grants["state"] == GrantState.GRANTED).tolist()
        self._check(grants["offset"][granted], np.array(nbytes, np.uint64)[granted])
        with self._news:
            self._tickets[ticket] = {i: (int(grants["offset"][i]), nbytes[i]) for i in granted}
            self._generations[grants["offset"][granted] // PAGE] = grants["generation"][granted]

    def send(self, ticket: int, written: Sequence[int]) -> Sequence[int]:
        places = self._tickets.get(ticket, {})
        known = [(i, *places[i]) for i in dict.fromkeys(written) if i in places]
        if not known:
            return []
        payloads = [(i, self._writable[offset : offset + nbytes]) for i, offset, nbytes in known]
        arrived = frozenset(self._carrier.put(Ask(self._session, ticket), payloads))
        return [i for i, _ in payloads if i in arrived]

    def ended(self, ticket: int) -> None:
        for offset, nbytes in self._tickets.pop(ticket, {}).values():
            _forget(self._mine, offset, nbytes)

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._carrier.close()

    def _check(self, offsets: NDArray[Any], nbytes: NDArray[Any]) -> None:
        """See that slots lie where this has memory: a host may say anything.

        Raises:
            ProtocolMismatch: they do not.
        """
        room = self._memory.nbytes - offsets.astype(np.float64)  # exact up to 2^53, and never around the corner
        if (offsets % PAGE).any() or (room < nbytes).any() or not nbytes.all():
            raise ProtocolMismatch(
                "the host names slots that are not in its arena; install the same kvtier on both sides"
            )

    def _begin(self, lease: int, first: int, end: int) -> bool:
        """Let the slots come that are not here, unless they are on their way; whether that began."""
        if lease in self._flying or self._closed:
            return False
        held = self._leases[lease]
        wanted = [i for i in range(first, min(end, len(held))) if not held[i].here][:MOST]
        self._flying.add(lease)
        self._threads.submit(self._fly, lease, held, wanted)
        return True

    def _fly(self, lease: int, held: Sequence[_Slot], wanted: Sequence[int]) -> None:
        """Bring slots of a lease here, on a thread of its own."""
        try:
            nbytes = sum(held[i].nbytes for i in wanted)
            pieces = self._carrier.get(Ask(self._session, lease, wanted), nbytes)
            if all(self._land(held[i], pieces) for i in wanted):
                pieces.close()
        except (SessionError, CorruptPayload):
            pass  # whoever waits finds that the rest did not come
        finally:
            with self._news:
                self._flying.discard(lease)
                self._news.notify_all()

    def _land(self, slot: _Slot, pieces: Iterator[memoryview]) -> bool:
        """Put a payload into its slot; False when the rest is gone, or nobody wants it any more.

        Raises:
            CorruptPayload: it is not what it should be.
        """
        filled = 0
        while filled < slot.nbytes:
            piece = next(pieces, None)
            if piece is None or not self._put(slot, filled, piece):
                return False
            filled += len(piece)
        verify_payload(self.readable[slot.offset : slot.offset + slot.nbytes].data, expected=slot.key)
        with self._news:
            slot.here = slot.leases > 0
            self._news.notify_all()
            return slot.here

    def _put(self, slot: _Slot, start: int, piece: memoryview) -> bool:
        with self._news:
            if not slot.leases or self._closed or start + len(piece) > slot.nbytes:
                return False
            if not slot.here:  # another lease may have brought it meanwhile
                begin = slot.offset + start
                self._memory[begin : begin + len(piece)] = np.frombuffer(piece, np.uint8)
            return True


def _space(nbytes: int) -> tuple[mmap.mmap, NDArray[np.uint8]]:
    """Address space without memory: a page is there once it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
    try:
        space = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, ValueError, OverflowError) as exc:
        raise SessionUnavailable(f"this process gets no address space for an arena of {nbytes:,} bytes: {exc}") from exc
    return space, np.frombuffer(space, np.uint8)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def _forget(space: mmap.mmap, offset: int, nbytes: int) -> None:
    """Give the memory of a slot back."""
    space.madvise(mmap.MADV_DONTNEED, offset, slot_nbytes(nbytes))
