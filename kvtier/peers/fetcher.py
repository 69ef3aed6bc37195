"""Fetching blocks from whoever has them, until all are there or time is over."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from kvtier.errors import (
    DeadlineExceeded,
    KVTierError,
    OverQuota,
    ProtocolMismatch,
    SessionUnavailable,
    Unauthenticated,
)
from kvtier.peers.choose import Part, Want, choose, cut
from kvtier.peers.fetch import CORRUPT, WHOLE, fetch
from kvtier.peers.peer import Peer

ROUNDS = 3
"""Hosts that are asked for one block, one after the other."""
REASONS: dict[type[KVTierError], str] = {
    DeadlineExceeded: "late",
    SessionUnavailable: "unreachable",
    Unauthenticated: "refused",
    ProtocolMismatch: "refused",
    OverQuota: "refused",
}
"""What blocks are counted as that did not come because of these."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How long a fetch may take, and on how many links.

    Attributes:
        seconds: for all of it.
        stall: seconds; a host from which nothing at all comes for so long is given up.
        wait: seconds on top of that for a host that must bring blocks up first.
        links: to one host at a time.
        streams: links that one host's share of a fetch is cut over.
        stream_nbytes: bytes that are worth a link.
        threads: links at a time beyond one for each fetch.
    """

    seconds: float = 10.0
    stall: float = 1.0
    wait: float = 1.0
    links: int = 8
    streams: int = 4
    stream_nbytes: int = 16 << 20
    threads: int = 8


class Fetcher:
    """Spreads blocks over hosts and links. Thread-safe.

    Args:
        limits: how long, and on how many links.
        clock: monotonic.
    """

    def __init__(self, limits: FetchLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._threads = ThreadPoolExecutor(limits.threads, "kvtier-fetch")
        self._lock = threading.Lock()
        """Guards the counters."""
        self._counters: Counter[str] = Counter()
        self.fault = ""

    @property
    def counters(self) -> dict[str, int]:
        """Blocks by what became of them at each host that was asked, and bytes that came."""
        with self._lock:
            return dict(self._counters)

    def __call__(self, wants: Sequence[Want]) -> set[int]:
        """Places of the blocks that are whole; nothing writes into any of them any more."""
        until = self._clock() + self._limits.seconds
        whole: set[int] = set()
        left = list(wants)
        for _ in range(ROUNDS):
            parts = [part for peer, share in choose(left) for part in self._cut(peer, share)]
            self._count("avoided", len(left) - sum(len(part.wants) for part in parts))
            left = []
            for part, answers in zip(parts, self._all(parts, until), strict=True):
                for want, answer in zip(part.wants, answers, strict=True):
                    if answer == WHOLE:
                        whole.add(want.place)
                    elif (other := want.without(part.peer)).routes:
                        left.append(other)
            if not left:
                break
        return whole

    def _all(self, parts: Sequence[Part], until: float) -> list[list[str]]:
        """Carry all parts, the first one on this thread; whatever happens, none is under way afterwards."""
        others: list[Future[list[str]]] = []
        try:
            others.extend(self._threads.submit(self._carry, part, until) for part in parts[1:])
            first = [self._carry(part, until) for part in parts[:1]]
        finally:
            wait(others)
        return [*first, *(other.result() for other in others)]

    def failed(self, peer: Peer, exc: KVTierError, blocks: int = 1) -> str:
        """Note that a host did not send so many blocks; what they are counted as."""
        reason = REASONS.get(type(exc), "refused")
        peer.failed(str(exc), avoid=not isinstance(exc, OverQuota))
        self.fault = f"{peer.door}: {exc}"
        self._count(reason, blocks)
        return reason

    def close(self) -> None:
        """Let go of the threads."""
        self._threads.shutdown()

    def _cut(self, peer: Peer, share: list[tuple[Want, bool]]) -> list[Part]:
        return list(cut(peer, share, streams=self._limits.streams, least=self._limits.stream_nbytes))

    def _carry(self, part: Part, until: float) -> list[str]:
        """What became of each block of one part."""
        answers: list[str] = []
        began = self._clock()
        if began >= until:
            self._count("late", len(part.wants))
            return ["late"] * len(part.wants)
        peer, pause = part.peer, self._limits.wait if part.deep else 0.0
        try:
            with peer.carrying(part.nbytes), peer.link(until) as link:
                began = self._clock()
                fetch(link, part.wants, pause, seconds=until - began, until=until, tell=answers.append)
        except KVTierError as exc:
            self._note(part, answers)
            missing = len(part.wants) - len(answers)
            return answers + [self.failed(peer, exc, missing)] * missing
        self._note(part, answers, 0.0 if part.deep else self._clock() - began)
        if CORRUPT in answers:
            peer.failed("it sent payloads that are not what was stored")
        else:
            peer.succeeded()
        return answers

    def _count(self, what: str, blocks: int) -> None:
        if blocks:
            with self._lock:
                self._counters[what] += blocks

    def _note(self, part: Part, answers: Sequence[str], seconds: float = 0.0) -> None:
        """Count what became of the blocks that were answered."""
        whole = [want.nbytes for want, answer in zip(part.wants, answers, strict=False) if answer == WHOLE]
        part.peer.came(len(whole), sum(whole), seconds)
        with self._lock:
            self._counters.update(answers)
            if whole:
                self._counters["bytes"] += sum(whole)
        if CORRUPT in answers:
            self.fault = f"{part.peer.door} sent payloads that are not what was stored"
        elif whole:
            self.fault = ""
