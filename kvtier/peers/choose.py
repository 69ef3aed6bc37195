"""Which hosts to ask for which blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvtier.peers.peer import Peer
from kvtier.peers.wire import ITEMS_LIMIT

DEEP = 3.0
"""So many times as slow a block is guessed to come that the other host must bring up first."""
GUESS = 1e-9
"""Seconds a byte of a host that nothing came from yet, where nothing came from any."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way to a block.

    Attributes:
        peer: who has it.
        deep: whether it may have to bring it up first.
        nbytes: of its payload there.
    """

    peer: Peer
    deep: bool
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """One block that is to be fetched.

    Attributes:
        place: in the call.
        key: 34-byte address.
        into: memory for exactly its payload.
        routes: ways that were not tried yet.
    """

    place: int
    key: bytes
    into: memoryview
    routes: tuple[Route, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return len(self.into)

    def without(self, peer: Peer) -> Want:
        """The same, but for the ways to this peer."""
        return replace(self, routes=tuple(route for route in self.routes if route.peer is not peer))


@dataclass(frozen=True, slots=True)
class Part:
    """What one link shall fetch.

    Attributes:
        peer: from where.
        wants: at most `ITEMS_LIMIT`.
        deep: whether some of it may have to be brought up first.
    """

    peer: Peer
    wants: list[Want]
    deep: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(want.nbytes for want in self.wants)


def choose(wants: Iterable[Want]) -> Iterator[tuple[Peer, list[tuple[Want, bool]]]]:
    """Give each block to the host that will have sent it first, by its pace and by what is under way there.

    Blocks whose hosts are all being avoided are given to nobody.
    """
    shares: dict[Peer, list[tuple[Want, bool]]] = {}
    loads: dict[Peer, tuple[float, float]] = {}
    """Bytes that a host has to send, and its seconds a byte."""
    wants = list(wants)
    for peer in {route.peer for want in wants for route in want.routes}:
        if peer.admits():
            loads[peer] = peer.under_way, peer.slowness()
    guess = min((pace for _, pace in loads.values() if pace), default=GUESS)
    for want in wants:
        best, least = None, float("inf")
        for route in want.routes:
            if route.peer in loads:
                load, pace = loads[route.peer]
                cost = (load + want.nbytes) * (pace or guess) * (DEEP if route.deep else 1)
                if cost < least:
                    best, least = route, cost
        if best is not None:
            load, pace = loads[best.peer]
            loads[best.peer] = load + want.nbytes, pace
            shares.setdefault(best.peer, []).append((want, best.deep))
    yield from shares.items()


def cut(peer: Peer, share: Sequence[tuple[Want, bool]], *, streams: int, least: int) -> Iterator[Part]:
    """Cut one host's share into what several links carry.

    Args:
        peer: the host.
        share: its blocks, and whether they may have to be brought up.
        streams: links at a time.
        least: bytes that are worth a link.
    """
    total = sum(want.nbytes for want, _ in share)
    size = -(-total // max(1, min(streams, total // least)))
    part: list[tuple[Want, bool]] = []
    held = 0
    for want, deep in share:
        if part and (held >= size or len(part) == ITEMS_LIMIT):
            yield _part(peer, part)
            part, held = [], 0
        part.append((want, deep))
        held += want.nbytes
    if part:
        yield _part(peer, part)


def _part(peer: Peer, blocks: list[tuple[Want, bool]]) -> Part:
    return Part(peer, [want for want, _ in blocks], any(deep for _, deep in blocks))
