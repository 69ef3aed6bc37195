"""The last batches of a publisher, for those who missed some."""

from __future__ import annotations

from collections import deque
from itertools import islice


class Ring:
    """Payloads in a row under sequence numbers that grow by one; the oldest leave when there are too many.

    Not thread-safe.

    Args:
        first: number of the first.
        batches: how many are kept.
        nbytes: how many bytes of them; the newest is kept in any case.

    Attributes:
        first: number of the first that there ever was.
        last: number of the last; one less than `first` before there is any.
    """

    def __init__(self, first: int, *, batches: int, nbytes: int) -> None:
        self.first, self.last = first, first - 1
        self._most, self._most_nbytes = batches, nbytes
        self._kept: deque[bytes] = deque()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, payload: bytes) -> int:
        """Keep one; its number."""
        self.last += 1
        self._kept.append(payload)
        self._nbytes += len(payload)
        while len(self._kept) > self._most or (self._nbytes > self._most_nbytes and len(self._kept) > 1):
            self._nbytes -= len(self._kept.popleft())
        return self.last

    def skip(self) -> None:
        """A batch that nobody will ever get: what was before it leads nobody to what comes."""
        self.last += 1
        self._kept.clear()
        self._nbytes = 0

    def since(self, number: int, *, batches: int = 1 << 62, nbytes: int = 1 << 62) -> list[tuple[int, bytes]]:
        """Those from this number on that are still there; all, when it is from a life on a clock that was ahead.

        Args:
            number: of the first that is wanted.
            batches: how many at most.
            nbytes: bytes of them at most; one comes in any case.
        """
        oldest = self.last - len(self._kept) + 1
        missing = max(0, number - oldest) if number <= self.last + 1 else 0
        found: list[tuple[int, bytes]] = []
        for i, payload in enumerate(islice(self._kept, missing, min(missing + batches, len(self._kept))), missing):
            nbytes -= len(payload)
            if nbytes < 0 and found:
                break
            found.append((oldest + i, payload))
        return found
