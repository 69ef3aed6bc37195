"""The index of a fleet, in Redis. The package's docstring says how and why."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from kvtier.errors import SessionUnavailable
from kvtier.index.base import MAX_REPLICAS, Life, Node, Replica, Swept
from kvtier.index.breaker import Breaker
from kvtier.index.entry import pack_body
from kvtier.index.find import FAULTS, Finder, Fixed, Layout
from kvtier.index.lookups import Lookups
from kvtier.index.masters import Masters
from kvtier.index.nodes import LEAVE, NODES, read_nodes, register
from kvtier.index.options import RedisIndexOptions
from kvtier.index.pending import DISCARD
from kvtier.index.reader import Reader
from kvtier.index.sweep import Sweep, Sweeper
from kvtier.index.tell import Teller
from kvtier.index.writer import Writer

CLAIMS_LIMIT = 65_536
FIND_AGAIN = 5.0
"""Seconds for which Sentinels or a Cluster that did not answer are not asked, as long as the masters do."""


class RedisIndex:
    """One host's voice in the index of a fleet.

    `match` runs in the caller's thread on connections with a short time-out. The rest happens in `step`, which a
    thread of its own calls, on a connection that may take longer.

    `node` and `incarnation` change at most once, when a provisional life is refused.
    """

    def __init__(
        self,
        lookups: Lookups,
        masters: Masters,
        life: Life,
        *,
        finder: Finder | None = None,
        options: RedisIndexOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        run: bool = True,
    ) -> None:
        """Speak for one life of one host.

        Args:
            lookups: asks within a short time; closed with the index, like the others.
            masters: are told in the background.
            life: as `register` gave it.
            finder: says who the masters are.
            options: paces and bounds.
            clock: monotonic, in seconds.
            run: start the thread; else the owner calls `step`.
        """
        self._life = life
        self._options = options = options or RedisIndexOptions()
        self._clock = clock
        self._closed = threading.Event()
        self._forgotten: set[int] = set()
        self._leaving = False
        self._beat_at = clock()
        self._claims: list[tuple[bytes, int, int]] = []
        self._claiming = threading.Lock()
        paces = {"pause": options.pause, "longest": options.longest_pause}
        span = (options.failures - 1) * options.lookup_timeout * 0.9  # as long as one caller takes to fail so often
        slow = Breaker(clock, failures=options.failures, span=span, **paces)
        away = Breaker(clock, failures=1, **paces)
        self._lookups = lookups
        self._masters = masters
        self._finder = finder or Fixed()
        self._layout: Layout | None = None
        self._find_at = clock()
        teller = Teller(masters, life)
        rest = self._closed.wait if run else (lambda _seconds: None)
        self._writer = Writer(away, teller, options, rest, clock)
        self._reader = Reader(lookups, slow, self._writer.pending.nudge, life)
        self._sweeper = Sweeper(masters, options, clock, self._met)
        lookups.wake = self._writer.pending.nudge
        self._thread: threading.Thread | None = None
        if run:
            self._thread = threading.Thread(target=self._run, name="kvtier-index", daemon=True)
            self._thread.start()

    @property
    def node(self) -> int:
        return self._life.node

    @property
    def incarnation(self) -> int:
        return self._life.incarnation

    def match(self, keys: Sequence[bytes]) -> list[tuple[Replica, ...]] | None:
        return None if self._closed.is_set() else self._reader.match(keys)

    def lacking(self, held: Sequence[tuple[bytes, int, int]]) -> list[bytes] | None:
        keys = [key for key, _, _ in held]
        untold = self._writer.pending.among(keys)  # before looking: what is told in between is seen
        found = self.match(keys)
        if found is None:
            return None
        mine = self.node, self.incarnation
        return [
            key
            for (key, tier, nbytes), replicas in zip(held, found, strict=True)
            if key not in untold
            and Replica(*mine, tier, nbytes) not in replicas
            and (len(replicas) < MAX_REPLICAS or any(replica.node == mine[0] for replica in replicas))
        ]

    def claims(self) -> list[tuple[bytes, int, int]]:
        with self._claiming:
            claims, self._claims = self._claims, []
        return claims

    def sweep(self, *, trim: bool) -> Iterator[Swept]:
        try:
            yield from Sweep(self._masters, self._life, bury_after=self._options.bury_after, trim=trim)
        except FAULTS as exc:
            raise SessionUnavailable(f"the index did not answer: {exc}") from exc

    def others(self) -> bool:
        live = self._reader.live
        return len(live) > (self.node in live)

    def nodes(self) -> list[Node]:
        return list(self._reader.nodes)

    def add(self, keys: Sequence[bytes], tier: int, nbytes: Sequence[int]) -> None:
        bodies = {size: pack_body(tier, size) for size in set(nbytes)}
        self._writer.saying(keys)
        self._writer.queue(zip(keys, [bodies[size] for size in nbytes], strict=True))

    def discard(self, keys: Sequence[bytes]) -> None:
        self._writer.saying(keys)
        self._writer.queue(zip(keys, itertools.repeat(DISCARD)))

    def publish(self, inventory: Iterable[tuple[bytes, int, int]]) -> None:
        self._writer.publish(inventory)

    def forget(self, node: int) -> None:
        if node == self._life.node:
            self._leaving = True  # its next heartbeat would bring it back: `close` does it
            return
        self._forgotten.add(node)
        self._show([seen for seen in self._reader.nodes if seen.node != node])
        self._writer.pending.nudge()

    def needs_publish(self) -> bool:
        return self._writer.needs_publish

    def flush(self, timeout: float) -> bool:
        if self._thread is None:
            self.step()
            timeout = 0
        return self._writer.pending.wait_empty(timeout)

    def status(self) -> dict[str, object]:
        reader, writer, sweeper = self._reader, self._writer, self._sweeper
        reason = self._trouble()
        return {
            "kind": "redis",
            "ok": not reason,
            "reason": reason,
            "node": self.node,
            "incarnation": self.incarnation,
            "nodes_alive": len(reader.live),
            "lookups": reader.lookups,
            "round_trips": reader.round_trips,
            "lookup_errors": reader.errors,
            "unasked": reader.unasked,
            "unanswered": reader.unanswered,
            "breaker_opened": reader.breaker.opened,
            "breaker_open": not reader.breaker.closed,
            "masters": len(self._masters.all),
            "queued": len(writer.pending),
            "lag": writer.pending.lag,
            "told": writer.told,
            "dropped": writer.pending.dropped,
            "update_errors": writer.errors,
            "needs_publish": writer.needs_publish,
            "swept_rounds": sweeper.rounds,
            "swept_keys": sweeper.keys,
            "swept_dead": sweeper.deleted,
            "sweep_errors": sweeper.faults,
        }

    def close(self) -> None:
        self._closed.set()
        self._writer.pending.nudge()
        if self._thread is not None:
            self._thread.join()
        if self._leaving and not self._writer.superseded:
            with suppress(*FAULTS):
                self._masters.run(LEAVE, NODES, [self._life.node, self._life.incarnation])
        self._lookups.close()
        self._masters.close()
        self._finder.close()

    def step(self) -> None:
        """One round of the background work.

        Find the masters, open connections, heartbeat and look at the node table, tell what is pending, sweep a little.
        """
        reader, writer = self._reader, self._writer
        if self._lookups.misplaced and writer.breaker.closed:
            self._find()
        reader.tend()
        away = not writer.breaker.closed
        if away and not writer.breaker.due():
            return
        if (away or reader.look or self._forgotten or self._clock() >= self._beat_at) and not self._beat():
            return
        writer.drain()
        if writer.breaker.closed and not writer.superseded:
            self._sweeper.step(self._life, len(reader.live))

    def _run(self) -> None:
        options, reader, writer = self._options, self._reader, self._writer
        while not self._closed.is_set():
            self.step()
            away = not writer.breaker.closed
            busy = math.inf if away else min(self._beat_at - self._clock(), self._sweeper.wait())
            wait = min(reader.breaker.wait(), writer.breaker.wait() if away else busy)
            writer.pending.wait_for_work(max(0.0, wait), batch=options.batch, linger=options.linger, idle=away)

    def _beat(self) -> bool:
        """Tell that this host lives, and look who else does; False when Redis does not answer."""
        self._beat_at = self._clock() + self._options.heartbeat
        self._reader.look = False
        if not self._find():
            return False
        try:
            if not self._writer.heartbeat():
                if not self._writer.superseded:
                    return False
                if self._life.provisional and not self._writer.teller.confirmed:
                    self._life = register(self._masters.of(NODES), self._life.host, self._life.door)
                    self._writer.speak_for(Teller(self._masters, self._life))
            for node in tuple(self._forgotten):
                self._masters.of(NODES).hdel(NODES, str(node))
                self._forgotten.discard(node)
            self._show(list(read_nodes(self._masters.of(NODES), self._options.dead_after).values()))
        except FAULTS as exc:
            self._reader.look = True
            self._writer.failed(exc)
            return False
        return True

    def _find(self) -> bool:
        """Look who the masters are; False when nobody has ever said so. Who does not answer need not have lost them."""
        if self._layout is not None and self._writer.breaker.closed and self._clock() < self._find_at:
            return True
        try:
            layout = self._finder.find()
        except FAULTS as exc:
            self._find_at = self._clock() + FIND_AGAIN
            if self._layout is None:
                self._writer.failed(exc)
            return self._layout is not None
        self._lookups.misplaced = False
        if layout != self._layout:
            self._layout = layout
            self._masters.take(layout)
            self._lookups.take(layout)
        return True

    def _met(self, part: Swept) -> None:
        """A round through the index met these entries of this host's."""
        with self._claiming:
            self._claims.extend(part.mine[: CLAIMS_LIMIT - len(self._claims)])

    def _show(self, nodes: list[Node]) -> None:
        self._reader.show(nodes, None if self._writer.superseded else self._life)

    def _trouble(self) -> str:
        """What keeps the index from working now; empty when it is well."""
        reader, writer = self._reader, self._writer
        if writer.superseded or not writer.breaker.closed:
            return writer.fault
        if not reader.breaker.closed:
            return reader.fault
        if not reader.nodes:
            return "the node table was not read yet"
        if self._thread is not None and not self._thread.is_alive():
            return "the background thread has ended"
        return ""
