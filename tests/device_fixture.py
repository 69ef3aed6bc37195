"""One device of a tier that has several, as a dictionary that can be away."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.errors import TierUnavailable
from kvtier.memory.arena import Arena
from kvtier.testing.memory_tier import MemoryTier


class Device(MemoryTier):
    """A tier whose process may be away, and that evicts when it is told to; `hook` runs in each call."""

    def __init__(self, arena: Arena, capacity: int = 4 << 20) -> None:
        super().__init__(arena, capacity)
        self.away = False
        self.hook: Callable[[], object] = lambda: None
        self.evicted: list[bytes] = []

    def _enter(self) -> None:
        self.hook()
        if self.away:
            raise TierUnavailable("its process is gone")

    def write(self, keys, slots):
        self._enter()
        return super().write(keys, slots)

    def read(self, keys, slots):
        self._enter()
        return super().read(keys, slots)

    def remove(self, keys):
        self._enter()
        super().remove(keys)

    def contains(self, keys):
        self._enter()
        return super().contains(keys)

    def inventory(self):
        self._enter()
        return super().inventory()

    def usage(self):
        self._enter()
        return super().usage()

    def dropped(self):
        gone, self.evicted = self.evicted, []
        return gone

    def evict(self, key: bytes) -> None:
        super().remove([key])
        self.evicted.append(key)

    def lose_all(self) -> None:
        self._stored.clear()

    def has(self) -> set[bytes]:
        return set(self._stored)
