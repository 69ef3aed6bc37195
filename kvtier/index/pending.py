"""Updates that are not told yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from itertools import islice

Updates = dict[bytes, bytes]
"""Key -> body of this host's entry, or `DISCARD`."""

DISCARD = b""


class Pending:
    """A bounded set of updates in which a key's last word wins. Thread-safe.

    What `take` hands out stays in flight until `done` or `put_back`. Over its bound the set drops everything that is
    not in flight: then only publishing the whole inventory helps.

    Attributes:
        dropped: updates dropped at the bound.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the largest number of keys to keep, and a monotonic clock."""
        self.dropped = 0
        self._limit = limit
        self._clock = clock
        self._since: dict[bytes, float] = {}
        """When the first word of each key was queued that is not told, oldest first."""
        self._updates: Updates = {}
        self._flying: Updates = {}
        self._nudged = False
        self._flushing = 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._updates) + len(self._flying)

    @property
    def lag(self) -> float:
        """Seconds for which the oldest update has waited to be told."""
        with self._changed:
            oldest = next(iter(self._since.values()), None)
            return 0.0 if oldest is None else self._clock() - oldest

    def update(self, updates: Iterable[tuple[bytes, bytes]]) -> bool:
        """Queue; False when the bound was passed and everything was dropped."""
        with self._changed:
            now, new = self._clock(), dict(updates)
            for key in new:
                self._since.setdefault(key, now)
            self._updates.update(new)
            self._changed.notify_all()
            return self._within_bound()

    def take(self, count: int) -> Updates:
        """Hand out up to `count` updates, oldest first; they are in flight now."""
        with self._changed:
            keys = list(islice(self._updates, count))
            batch = {key: self._updates.pop(key) for key in keys}
            self._flying |= batch
            return batch

    def done(self, batch: Updates) -> None:
        """These were told."""
        with self._changed:
            self._land(batch)
            now = self._clock()
            for key in batch:
                self._since.pop(key, None)
                if key in self._updates:  # it has changed since; when is not known
                    self._since[key] = now
            self._changed.notify_all()

    def put_back(self, batch: Updates) -> bool:
        """These were not told: queue them again, behind newer words of the same keys; answers like `update`."""
        with self._changed:
            self._land(batch)
            self._updates = batch | self._updates
            return self._within_bound()

    def among(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of these keys that something is still to be told of."""
        with self._changed:
            return {key for key in keys if key in self._updates or key in self._flying}

    def clear(self) -> None:
        """Drop everything that is not in flight."""
        with self._changed:
            self._drop()
            self._changed.notify_all()

    def nudge(self) -> None:
        """End a `wait_for_work` now."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def wait_for_work(self, timeout: float, *, batch: int, linger: float, idle: bool = False) -> None:
        """Return when a batch is full, `linger` seconds after the first update, on a nudge, or after `timeout`.

        With `idle`, updates are no reason to return.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._nudged or (self._updates and not idle), timeout)
            if not self._nudged and self._updates and not idle:
                self._changed.wait_for(
                    lambda: self._nudged or self._flushing or len(self._updates) >= batch, min(linger, timeout)
                )
            self._nudged = False

    def wait_empty(self, timeout: float) -> bool:
        """Wait until everything is told, without lingering; False when it was not in time or was dropped."""
        with self._changed:
            before = self.dropped
            self._flushing += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not len(self), timeout) and self.dropped == before
            finally:
                self._flushing -= 1

    def _land(self, batch: Updates) -> None:
        for key in batch:
            self._flying.pop(key, None)

    def _drop(self) -> None:
        self._updates.clear()
        self._since = {key: since for key, since in self._since.items() if key in self._flying}

    def _within_bound(self) -> bool:
        if len(self._updates) <= self._limit:
            return True
        self.dropped += len(self._updates)
        self._drop()
        self._changed.notify_all()
        return False
