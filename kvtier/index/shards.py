"""One thing for each master."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from redis import RedisError

from kvtier.index.address import Where
from kvtier.index.find import FAULTS, NOBODY, Layout


class Closable(Protocol):
    """What is made for a master."""

    def close(self) -> None:
        """Drop connections."""
        ...


T = TypeVar("T", bound=Closable)


class Shards(Generic[T]):
    """Keeps one `T` for each master of the layout, made and closed as layouts come.

    Readers take `now` once a call: it changes as a whole.

    Attributes:
        now: the layout, and the things in the order of its masters.
    """

    def __init__(self, make: Callable[[Where], T], layout: Layout) -> None:
        """Take what makes one for a master."""
        self._make = make
        self._known: dict[Where, T] = {}
        self.now: tuple[Layout, tuple[T, ...]] = (layout, ())
        self.take(layout)

    def take(self, layout: Layout) -> None:
        """From now on the masters are these; one thread at a time."""
        before = self._known
        self._known = {where: before.get(where) or self._make(where) for where in layout.masters}
        self.now = (layout, tuple(self._known[where] for where in layout.masters))
        for where in before.keys() - self._known.keys():
            _close(before[where])

    def of(self, key: bytes) -> T:
        """The one of the master that has a key.

        Raises:
            redis.RedisError: nobody has it now.
        """
        layout, things = self.now
        number = layout.of(key) if things else NOBODY
        if number == NOBODY:
            raise RedisError("no master has this key now")
        return things[number]

    def close(self) -> None:
        """Close all."""
        for thing in self._known.values():
            _close(thing)


def _close(thing: Closable) -> None:
    with suppress(*FAULTS):
        thing.close()
