"""The index of a fleet, in Redis. The package's docstring says how and why."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from redis import Redis

from kvtier.index.base import Life, Node, Replica
from kvtier.index.breaker import Breaker
from kvtier.index.entry import pack_body
from kvtier.index.nodes import NODES, read_nodes, register
from kvtier.index.options import RedisIndexOptions
from kvtier.index.pending import DISCARD
from kvtier.index.reader import FAULTS, Reader
from kvtier.index.tell import Teller
from kvtier.index.writer import Writer


class RedisIndex:
    """One host's voice in the index of a fleet.

    `match` runs in the caller's thread on connections with a short time-out. The rest happens in `step`, which a
    thread of its own calls, on a connection that may take longer.

    `node` and `incarnation` change at most once, when a provisional life is refused.
    """

    def __init__(
        self,
        lookups: Redis,
        updates: Redis,
        life: Life,
        *,
        options: RedisIndexOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        run: bool = True,
    ) -> None:
        """Speak for one life of one host.

        Args:
            lookups: client with a short time-out; closed with the index.
            updates: client with a patient time-out; closed with the index.
            life: as `register` gave it.
            options: paces and bounds.
            clock: monotonic, in seconds.
            run: start the thread; else the owner calls `step`.
        """
        self._life = life
        self._options = options = options or RedisIndexOptions()
        self._clock = clock
        self._closed = False
        self._forgotten: set[int] = set()
        self._beat_at = clock()
        slow = Breaker(clock, failures=options.failures, pause=options.pause, longest=options.longest_pause)
        away = Breaker(clock, failures=1, pause=options.pause, longest=options.longest_pause)
        self._lookups = lookups
        self._updates = updates
        teller = Teller(updates, life)
        self._writer = Writer(updates, away, teller, batch=options.batch, max_pending=options.max_pending)
        self._reader = Reader(lookups, slow, self._writer.pending.nudge, life)
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

    def match(self, keys: Sequence[bytes]) -> list[tuple[Replica, ...]]:
        return [()] * len(keys) if self._closed else self._reader.match(keys)

    def others(self) -> bool:
        live = self._reader.live
        return len(live) > (self.node in live)

    def nodes(self) -> list[Node]:
        return list(self._reader.nodes)

    def add(self, keys: Sequence[bytes], tier: int, nbytes: Sequence[int]) -> None:
        bodies = {size: pack_body(tier, size) for size in set(nbytes)}
        self._writer.queue(zip(keys, [bodies[size] for size in nbytes], strict=True))

    def discard(self, keys: Sequence[bytes]) -> None:
        self._writer.discarding(keys)
        self._writer.queue(zip(keys, itertools.repeat(DISCARD)))

    def publish(self, inventory: Iterable[tuple[bytes, int, int]]) -> None:
        self._writer.publish(inventory)

    def forget(self, node: int) -> None:
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
        reader, writer = self._reader, self._writer
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
            "breaker_opened": reader.breaker.opened,
            "queued": len(writer.pending),
            "told": writer.told,
            "dropped": writer.pending.dropped,
            "update_errors": writer.errors,
            "needs_publish": writer.needs_publish,
        }

    def close(self) -> None:
        self._closed = True
        self._writer.pending.nudge()
        if self._thread is not None:
            self._thread.join()
        self._lookups.close()
        self._updates.close()

    def step(self) -> None:
        """One round of the background work: probe, heartbeat and look at the node table, tell what is pending."""
        reader, writer = self._reader, self._writer
        if reader.breaker.due():
            reader.probe()
        away = not writer.breaker.closed
        if away and not writer.breaker.due():
            return
        if (away or reader.look or self._forgotten or self._clock() >= self._beat_at) and not self._beat():
            return
        writer.drain()

    def _run(self) -> None:
        options, reader, writer = self._options, self._reader, self._writer
        reader.probe()  # so that the first lookup finds a connection
        while not self._closed:
            self.step()
            away = not writer.breaker.closed
            wait = min(reader.breaker.wait(), writer.breaker.wait() if away else self._beat_at - self._clock())
            writer.pending.wait_for_work(max(0.0, wait), batch=options.batch, linger=options.linger, idle=away)

    def _beat(self) -> bool:
        """Tell that this host lives, and look who else does; False when Redis does not answer."""
        self._beat_at = self._clock() + self._options.heartbeat
        self._reader.look = False
        try:
            if not self._writer.heartbeat():
                if not self._writer.superseded:
                    return False
                if self._life.provisional and not self._writer.teller.confirmed:
                    self._life = register(self._updates, self._life.host, self._life.door)
                    self._writer.speak_for(Teller(self._updates, self._life))
            for node in tuple(self._forgotten):
                self._updates.hdel(NODES, str(node))
                self._forgotten.discard(node)
            self._show(list(read_nodes(self._updates, self._options.dead_after).values()))
        except FAULTS as exc:
            self._reader.look = True
            self._writer.failed(exc)
            return False
        return True

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
