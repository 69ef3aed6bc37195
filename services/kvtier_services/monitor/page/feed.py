"""One poll for all who look, and what the last quarter of an hour was like."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec

log = logging.getLogger(__name__)

WATCHED, ALONE = 1.0, 5.0
"""Seconds between snapshots while somebody looks, and while nobody does."""
KEPT = 15 * 60.0
"""Seconds of history."""
MOST = 64
"""Who may follow at a time."""
BEAT = 15.0
"""Seconds after which one who follows hears that there is no news."""


class Full(Exception):
    """As many follow as may."""


class Feed:
    """Snapshots as they are taken. Used on one event loop; snapshots are taken on threads.

    Attributes:
        latest: the last snapshot, as JSON; None before the first.
        following: how many follow.
    """

    def __init__(self, snapshot: Callable[[], Mapping[str, Any]], clock: Callable[[], float] = time.monotonic) -> None:
        """Take no snapshot yet.

        Args:
            snapshot: takes one, in the calling thread.
            clock: seconds.
        """
        self._snapshot = snapshot
        self._clock = clock
        self.latest: bytes | None = None
        self.following = 0
        self._number = 0
        self._taken = float("-inf")
        self._news = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._points: deque[tuple[float, dict[str, Any]]] = deque()
        self._failed = ""
        self._ended = False

    async def run(self) -> None:
        """Take snapshots for ever."""
        while True:
            began = self._clock()
            await self._take()
            pause = (WATCHED if self.following else ALONE) - (self._clock() - began)
            self._wanted.clear()
            try:
                await asyncio.wait_for(self._wanted.wait(), max(0.05, pause))
            except TimeoutError:
                continue
            await asyncio.sleep(max(0.0, WATCHED - (self._clock() - began)))

    async def now(self) -> bytes:
        """A snapshot that is not old, as JSON.

        Raises:
            LookupError: none can be taken; the message says why.
        """
        if self._clock() - self._taken > 2 * WATCHED:
            before = self._number
            self._wanted.set()
            async with self._news:
                await self._news.wait_for(lambda: self._number > before)
        if self.latest is None or self._failed:
            raise LookupError(self._failed)
        return self.latest

    async def follow(self) -> AsyncGenerator[bytes]:
        """Each snapshot, as JSON; one who is slow misses some; empty where there is no news for long.

        Raises:
            Full: too many follow.
        """
        if self.following >= MOST:
            raise Full
        self.following += 1
        self._wanted.set()
        seen = 0
        try:
            while not self._ended:
                try:
                    async with asyncio.timeout(BEAT), self._news:
                        while (self._number == seen or self._failed) and not self._ended:
                            await self._news.wait()
                except TimeoutError:
                    yield b""
                    continue
                seen = self._number
                yield self.latest or b""
        finally:
            self.following -= 1

    async def end(self) -> None:
        """Let all who follow go."""
        async with self._news:
            self._ended = True
            self._news.notify_all()

    def history(self) -> bytes:
        """What is drawn as lines, as JSON: for each moment its time, and each host's figures."""
        return msgspec.json.encode({"points": [{"taken": at, "hosts": hosts} for at, hosts in self._points]})

    async def _take(self) -> None:
        try:
            taken = await asyncio.to_thread(self._snapshot)
            self.latest = msgspec.json.encode(taken)
            self._remember(taken)
            self._failed = ""
        except Exception as exc:  # noqa: BLE001 - whatever it is: the next may succeed
            said = " ".join(str(exc).split())[:300] or type(exc).__name__
            if said != self._failed:
                log.warning("no snapshot for the status page: %s", said)
            self._failed = said
        self._taken = self._clock()
        async with self._news:
            self._number += 1
            self._news.notify_all()

    def _remember(self, taken: Mapping[str, Any]) -> None:
        at = float(taken.get("taken", 0.0))
        while self._points and self._points[-1][0] > at:  # the clock was set back
            self._points.pop()
        if self._points and at - self._points[-1][0] < ALONE - WATCHED / 2:
            return
        self._points.append((at, {host["host"]: point(host) for host in taken["hosts"]}))
        while self._points and self._points[0][0] < at - KEPT:
            self._points.popleft()


def point(host: Mapping[str, Any]) -> dict[str, Any]:
    """What of a host is drawn as lines: bytes used by tier, blocks asked for and given, bytes moved by path."""
    hierarchy = host.get("hierarchy") or {}
    hits, misses = hierarchy.get("hits") or {}, hierarchy.get("misses") or {}
    return {
        "used": {tier["tier"]: tier["used"] for tier in hierarchy.get("tiers", ())},
        "hits": sum(hits.values()),
        "asked": sum(hits.values()) + sum(misses.values()),
        "moved": hierarchy.get("moved_nbytes") or {},
    }
