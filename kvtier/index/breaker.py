"""When to stop asking a server that does not answer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable


class Breaker:
    """Opens after some failures in a row, for a pause that doubles with every failed probe. Thread-safe.

        closed --failures in a row--> open --pause over--> due --probe--> closed, or open for twice as long

    Attributes:
        closed: whether to ask.
        opened: how often it opened.
    """

    def __init__(
        self, clock: Callable[[], float], *, failures: int, pause: float, longest: float, span: float = 0.0
    ) -> None:
        """Take when to open and for how long.

        Args:
            clock: monotonic, in seconds.
            failures: so many in a row open it.
            pause: its first pause, in seconds.
            longest: its longest.
            span: seconds that must be between the first of them and the last: many callers at once fail at once.
        """
        self.closed = True
        self.opened = 0
        self._clock = clock
        self._failures = failures
        self._span = span
        self._first = pause
        self._longest = longest
        self._lock = threading.Lock()
        self._count = 0
        self._pause = pause
        self._until = math.inf
        self._first_failed = 0.0

    def wait(self) -> float:
        """Seconds until a probe is due: infinite when closed, not above 0 when it is due now."""
        return math.inf if self.closed else self._until - self._clock()

    def due(self) -> bool:
        """Whether it is open and its pause is over."""
        return self.wait() <= 0

    def failed(self) -> None:
        """Note a failure; those of calls that began before it opened are not a probe's."""
        with self._lock:
            now = self._clock()
            self._first_failed = self._first_failed if self._count else now
            self._count += 1
            if self.closed and self._count >= self._failures and now - self._first_failed >= self._span:
                self._pause = self._first
                self.opened += 1
            elif self.due():
                self._pause = min(2 * self._pause, self._longest)
            else:
                return
            self.closed = False
            self._until = now + self._pause

    def succeeded(self) -> None:
        """Note an answer: closes it."""
        if self.closed and not self._count:
            return
        with self._lock:
            self._count = 0
            self.closed = True
