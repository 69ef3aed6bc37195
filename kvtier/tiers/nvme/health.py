"""When a failing device is left alone, and when it is tried again."""

from __future__ import annotations

from collections.abc import Callable

FAILURES = 3
"""Failures in a row after which a device is left alone."""
PAUSE = 30.0
"""Seconds for which it is left alone; one more failure afterwards begins the next pause."""


class Health:
    """How one kind of call to a device fares. Not thread-safe: used under the tier's lock.

    Attributes:
        fault: what went wrong last; empty after a success.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.fault = ""
        self._clock = clock
        self._failures = 0
        self._until = 0.0

    def succeeded(self) -> None:
        """The device works."""
        self.fault = ""
        self._failures = 0

    def failed(self, fault: str, *, final: bool = False) -> None:
        """The device failed; with `final` it is left alone at once."""
        self.fault = fault
        self._failures = max(self._failures + 1, FAILURES * final)
        if self._failures >= FAILURES:
            self._until = self._clock() + PAUSE

    @property
    def resting(self) -> bool:
        """Whether the device is being left alone now."""
        return self._failures >= FAILURES and self._clock() < self._until
