"""Making a range of memory usable in steps, while it is used already as far as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable

STEP = 64 << 20
"""Bytes: some hundredths of a second to allocate, so that the first is there at once. Steps begin at multiples of it,
in every process."""
RETRY = 5.0
"""Seconds until a step that could not be done is tried again."""

Prepare = Callable[[int, int], str]
"""Makes the bytes from one offset to another usable; why not, or empty when it is done."""


class Filling:
    """Prepares `[0, size)` from its beginning, on a thread of its own.

        0                ready           ready + STEP            size
        |---- usable ----|-- in the works --|---- not there yet ----|

    Attributes:
        ready: bytes that are prepared; only grows.
        fault: why the next step could not be done at the last try; empty while all goes well.
    """

    def __init__(self, size: int, prepare: Prepare, *, ready: int = 0, retry: float = RETRY) -> None:
        """Prepare nothing yet.

        Args:
            size: bytes.
            prepare: does one step.
            ready: bytes that need no preparation.
            retry: seconds.
        """
        self.ready = ready
        self.fault = ""
        self._size = size
        self._prepare = prepare
        self._retry = retry
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def step(self) -> bool:
        """Do the next step, if there is one and it can be done; whether it was."""
        if self.ready == self._size:
            return False
        end = min((self.ready // STEP + 1) * STEP, self._size)
        try:
            self.fault = self._prepare(self.ready, end)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is said, and tried again
            self.fault = f"{type(exc).__name__}: {exc}"
        if not self.fault:
            self.ready = end
        return not self.fault

    def start(self) -> None:
        """Do all other steps in the background."""
        if self.ready < self._size:
            self._thread = threading.Thread(target=self._run, name="kvtier-fill", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop; a step that is being done ends first. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self.ready < self._size and not self._closing.is_set():
            if not self.step():
                self._closing.wait(self._retry)
