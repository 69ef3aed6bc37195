"""Serves this host's blocks to the other hosts of its fleet."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import KVTierError, ProtocolMismatch
from kvtier.memory.arena import Arena
from kvtier.peers import wire
from kvtier.peers.base import Lender, Lent
from kvtier.peers.gate import Gate, GateLimits
from kvtier.peers.link import Link
from kvtier.peers.tls import Tls, TlsFiles
from kvtier.peers.wire import Kind, Status

WINDOW_NBYTES, WINDOW_BLOCKS = 32 << 20, 512
"""What is lent at once for one request; a single block may be larger."""
REQUEST = 5.0
"""Seconds for a request to come whole, once it has begun."""
LONGEST = 30.0
"""Seconds that one request may take, whatever it asks for."""


class PeerServer:
    """Answers other hosts out of the arena, on threads of its own; serves from the start.

    Args:
        lender: the blocks.
        arena: where they are.
        listen: address and port; port 0 for any.
        secret: the fleet's.
        tls: None for plain connections.
        threads: requests that are answered at once, of one host half as many; the others wait their turn.
        clock: monotonic.
        limits: how many connections, and for how long.

    Attributes:
        address: where it listens.

    Raises:
        ConfigError: it cannot listen there; the secret is too short; the certificate cannot be used.
    """

    def __init__(
        self,
        lender: Lender,
        arena: Arena,
        listen: tuple[str, int],
        secret: bytes,
        *,
        tls: TlsFiles | None = None,
        threads: int = 8,
        clock: Callable[[], float] = time.monotonic,
        limits: GateLimits | None = None,
    ) -> None:
        self._lender = lender
        self._memory = memoryview(arena.memory.data)
        self._clock = clock
        self._counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        """Guards the counters, and what follows."""
        self._each = max(1, threads // 2)
        self._busy: Counter[str] = Counter()
        self._held: dict[str, deque[Link]] = {}
        """Links of hosts that have as many requests answered as they may."""
        self._workers = ThreadPoolExecutor(threads, "kvtier-peer")
        try:
            self._gate = Gate(
                listen,
                secret,
                tls=Tls(tls) if tls else None,
                serve=self._queue,
                clock=clock,
                limits=limits or GateLimits(),
            )
        except BaseException:
            self._workers.shutdown()
            raise
        self.address = self._gate.address

    def usage(self) -> dict[str, int]:
        """Connections at present, and events since it was opened."""
        guests, links = self._gate.connections
        with self._lock:
            return {"guests": guests, "links": links, **self._counters, **self._gate.counters}

    def close(self) -> None:
        """Cut all connections and give everything back; idempotent. Waits for a lender that is bringing blocks up."""
        self._gate.close()
        self._workers.shutdown()

    def _queue(self, link: Link) -> None:
        with self._lock:
            if self._busy[link.peer] >= self._each:
                self._held.setdefault(link.peer, deque()).append(link)
                return
            self._busy[link.peer] += 1
        self._submit(link)

    def _submit(self, link: Link) -> None:
        try:
            self._workers.submit(self._serve, link)
        except RuntimeError:  # closed
            self._gate.drop(link)
            self._next(link.peer)

    def _next(self, peer: str) -> None:
        """A host has one request less that is being answered: the turn is its next one's."""
        with self._lock:
            held = self._held.get(peer)
            link = held.popleft() if held else None
            if not held:
                self._held.pop(peer, None)
            if link is None:
                self._busy -= Counter([peer])
        if link is not None:
            self._submit(link)

    def _serve(self, link: Link) -> None:
        """Answer one request; on a thread of its own."""
        try:
            self._answer_one(link)
        finally:
            self._next(link.peer)

    def _answer_one(self, link: Link) -> None:
        try:
            self._answer(link, *link.receive(self._clock() + REQUEST))
        except KVTierError as exc:
            self._count({"broken" if isinstance(exc, ProtocolMismatch) else "left": 1})
            self._gate.drop(link)
        except BaseException:
            self._count({"failed": 1})
            self._gate.drop(link)
            raise
        else:
            self._gate.rest(link)

    def _answer(self, link: Link, kind: Kind, body: bytes) -> None:
        if kind is Kind.FETCH:
            self._fetch(link, body)
        elif kind is Kind.OFFER:
            self._offer(link, body)
        else:
            raise ProtocolMismatch(f"another host asks with a frame of kind {kind.name}")

    def _fetch(self, link: Link, body: bytes) -> None:
        seconds, wait, keys, nbytes = wire.read_fetch(body)
        now = self._clock()
        until = now + min(seconds, LONGEST)
        ready = min(now + wait, until)
        for begin, end in windows(nbytes):
            part = keys[begin:end], nbytes[begin:end]
            lent = self._lender.lend(link.peer, *part, max(0.0, ready - self._clock()))
            try:
                self._send(link, begin, part[1], lent, until)
            finally:
                self._lender.give_back(lent)

    def _send(self, link: Link, begin: int, nbytes: NDArray[np.int64], lent: Lent, until: float) -> None:
        """Send what is lent; the lease holds until all of it is with the kernel."""
        there = (lent.slots.offsets >= 0) & (lent.slots.nbytes == nbytes)
        statuses = np.where(there, int(Status.SENT), int(Status.ABSENT)).astype(np.uint8)
        places = zip(lent.slots.offsets[there].tolist(), nbytes[there].tolist(), strict=True)
        payloads = [self._memory[offset : offset + size] for offset, size in places]
        link.send(Kind.BLOCKS, wire.blocks(begin, statuses.tobytes()), until, payloads)
        self._count({"blocks": len(payloads), "bytes": int(nbytes[there].sum()), "absent": int((~there).sum())})

    def _offer(self, link: Link, body: bytes) -> None:
        door, keys, nbytes = wire.read_offer(body)
        taken = self._lender.offered(link.peer, keys, nbytes, door)
        link.send(Kind.TAKEN, wire.NUMBER.pack(taken), self._clock() + REQUEST)
        self._count({"offered": len(keys), "taken": taken})

    def _count(self, events: dict[str, int]) -> None:
        with self._lock:
            self._counters.update(events)


def windows(nbytes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut a request into what is lent at once: first block and the one after the last."""
    begin, held = 0, 0
    for place, size in enumerate(nbytes.tolist()):
        if place > begin and (held + size > WINDOW_NBYTES or place - begin == WINDOW_BLOCKS):
            yield begin, place
            begin, held = place, 0
        held += size
    if begin < len(nbytes):
        yield begin, len(nbytes)
