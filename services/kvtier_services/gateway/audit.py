"""What was done, or tried, with the right to touch others."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

LIMIT = 16 << 20
"""Bytes of one file; when it is full, the next begins."""
KEPT = 4
"""Full files that are kept."""
REFUSALS, MINUTE = 20, 60.0
"""Calls of one tenant without the right to them that are written down, in so many seconds."""


class Refusals:
    """Which calls of tenants that may not make them are written down: the first few a minute.

    Else who may do nothing could turn the file over until nothing is left of what others did.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seen: Counter[str] = Counter()

    def one_more(self, tenant: str) -> bool:
        """Whether one more of this tenant is to be written down."""
        if self._clock() >= self._since + MINUTE:
            self._since = self._clock()
            self._seen.clear()
        self._seen[tenant] += 1
        return self._seen[tenant] <= REFUSALS


class AuditLog:
    """JSON lines that are only ever appended to, in a file that this user alone reads.

    Args:
        path: of the file; full ones are called `path.1`, the youngest, to `path.4`.
        limit: bytes of one file.
        clock: seconds since the epoch.
    """

    def __init__(self, path: Path, *, limit: int = LIMIT, clock: Callable[[], float] = time.time) -> None:
        self._path, self._limit, self._clock = path, limit, clock

    def write(self, *, who: str, tenant: str, peer: str, what: str, result: str, **details: Any) -> None:
        """Write one line.

        Args:
            who: name of the token.
            tenant: that it belongs to.
            peer: address of the client.
            what: the call.
            result: what came of it.
            **details: what it was about.
        """
        line = {"at": self._clock(), "who": who, "tenant": tenant, "peer": peer, "what": what, "result": result}
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, msgspec.json.encode(line | details) + b"\n")
            full = os.fstat(fd).st_size >= self._limit
        finally:
            os.close(fd)
        if full:
            self._turn()

    def _turn(self) -> None:
        """The file is full: it and those before it move on by one; the oldest goes."""
        named = [self._path, *(self._path.with_name(f"{self._path.name}.{i}") for i in range(1, KEPT + 1))]
        for older, younger in zip(reversed(named[1:]), reversed(named[:-1]), strict=True):
            if younger.exists():
                younger.replace(older)
