"""The update side of the Redis index."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable

from kvtier.index.breaker import Breaker
from kvtier.index.entry import pack_body
from kvtier.index.find import FAULTS
from kvtier.index.options import RedisIndexOptions
from kvtier.index.pending import Pending, Updates
from kvtier.index.tell import Teller, Told

SAID_LIMIT = 1 << 20
"""Keys that are remembered because something was said of them during a publication; with more, it begins anew."""


class Writer:
    """Tells what its host holds.

    `queue` runs in any thread and never waits; the others wait for Redis, one at a time.

    Attributes:
        pending: what is not told yet.
        teller: the life of the host that is told for.
        breaker: open while Redis does not answer.
        needs_publish: Redis does not have what was told before, or nothing was told in this life.
        superseded: the host registered again, or is another's now: nothing more is told.
        told: updates told.
        errors: batches and other calls that failed.
        fault: the last error.
    """

    def __init__(
        self,
        breaker: Breaker,
        teller: Teller,
        options: RedisIndexOptions,
        rest: Callable[[float], object],
        clock: Callable[[], float],
    ) -> None:
        """Take whom to tell for, paces and bounds, how to rest for some seconds, and a monotonic clock."""
        self.breaker = breaker
        self.teller = teller
        self.pending = Pending(options.max_pending, clock)
        self.needs_publish = True
        self.superseded = False
        self.told = self.errors = 0
        self.fault = ""
        self._batch = options.batch
        self._seconds = 1 / options.publish_rate
        self._rest = rest
        self._telling = threading.RLock()
        self._publishing = threading.Lock()
        self._said: set[bytes] | None = None

    def speak_for(self, teller: Teller) -> None:
        """Tell for another life from now on."""
        with self._telling:
            self.teller = teller
            self.superseded = False
            self.needs_publish = True

    def queue(self, updates: Iterable[tuple[bytes, bytes]]) -> None:
        """Tell these later: key and body of its entry, or `DISCARD`."""
        if not self.superseded and not self.pending.update(updates):
            self.needs_publish = True

    def saying(self, keys: Iterable[bytes]) -> None:
        """Keep these out of a `publish` that is under way, which knows older things; called before they are queued."""
        said = self._said
        if said is not None:
            said.update(keys)

    def heartbeat(self) -> bool:
        """Tell that the host lives; False when Redis does not answer or refuses."""
        with self._telling:
            return self._tell({})

    def drain(self) -> None:
        """Tell what is pending, until there is nothing or Redis does not answer."""
        with self._telling:
            while batch := self.pending.take(self._batch):
                if self._tell(batch) or self.superseded:
                    self.pending.done(batch)
                    continue
                if not self.pending.put_back(batch):
                    self.needs_publish = True
                return

    def publish(self, inventory: Iterable[tuple[bytes, int, int]]) -> None:
        """`Index.publish`; gives up when Redis does not answer or lost something meanwhile."""
        parts = iter(inventory)
        with self._publishing:
            said = self._said = set()
            try:
                if not self.heartbeat():
                    return
                self.needs_publish = False
                while not self.needs_publish and (part := list(itertools.islice(parts, self._batch))):
                    with self._telling:  # what is said from here on is told after this batch
                        batch = {key: pack_body(tier, size) for key, tier, size in part if key not in said}
                        if not self._tell(batch):
                            self.needs_publish = True
                    self.drain()
                    self._rest(len(part) * self._seconds)
                    if len(said) > SAID_LIMIT:
                        self.needs_publish = True
            finally:
                self._said = None

    def failed(self, exc: Exception) -> None:
        """Note a call that failed."""
        self.errors += 1
        self.fault = f"update: {exc}"
        self.breaker.failed()

    def _tell(self, updates: Updates) -> bool:
        try:
            told = self.teller.tell(updates)
        except FAULTS as exc:
            self.failed(exc)
            return False
        self.breaker.succeeded()
        self.superseded = told is Told.SUPERSEDED
        if self.superseded:
            self.fault = (
                f"node {self.teller.life.node} was registered again after incarnation {self.teller.life.incarnation}, "
                "or by a host of another name; this one tells nothing more"
            )
            self.pending.clear()
            return False
        if told is Told.LOST:  # never "|=": others set it meanwhile
            self.needs_publish = True
        self.told += len(updates)
        return True
