"""How often a host that does not answer is asked."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.errors import SessionError

FIRST, LONGEST = 0.05, 1.0


class Backoff:
    """After a failure, calls fail at once for a while that doubles with each further failure.

    So an engine whose host is gone or hangs loses one deadline now and then, not one a request. Not locked: threads
    that race here at worst ask once more.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause = 0.0
        self._until = 0.0
        self._why: SessionError | None = None

    def check(self) -> None:
        """Raise the last failure again while its pause lasts."""
        why = self._why
        if why is not None and self._clock() < self._until:
            raise type(why)(str(why))

    def failed(self, why: SessionError) -> None:
        """The host did not answer."""
        self._pause = min(2 * self._pause or FIRST, LONGEST)
        self._until = self._clock() + self._pause
        self._why = why

    def worked(self) -> None:
        """The host answered."""
        self._pause = 0.0
        self._why = None
