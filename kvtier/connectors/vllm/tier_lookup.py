"""Which chunks are in the cache, asked in the background; what was found stays until it is loaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager

from kvtier.client.hit import Hit
from kvtier.client.rows import RUNS
from kvtier.connectors.vllm.tier_rows import TierRows

EMPTY = 2
"""Holes in a sequence behind which nothing is looked for any more."""
LONGEST = 30.0
"""Seconds for which what nobody loads is kept."""


class Pins:
    """Leases of what requests were promised. Thread-safe.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._hits: dict[str, list[tuple[float, Hit]]] = {}

    def begin(self, request: str) -> None:
        """Things may be promised to a request."""
        with self._lock:
            self._hits.setdefault(request, [])

    def hold(self, request: str, hit: Hit) -> None:
        """Keep what was found; not for a request that has ended meanwhile."""
        with self._lock:
            held = self._hits.get(request)
            if held is not None:
                held.append((self._clock(), hit))
                return
        hit.close()

    def take(self, request: str) -> list[Hit]:
        """What a request was promised so far; the caller closes it."""
        with self._lock:
            held = self._hits.get(request)
            if not held:
                return []
            self._hits[request] = []
        return [hit for _, hit in held]

    def end(self, request: str) -> None:
        """A request has ended."""
        hits = self.take(request)
        with self._lock:
            self._hits.pop(request, None)
        _close(hits)

    def sweep(self) -> None:
        """Let go of what nobody has loaded for long."""
        limit = self._clock() - LONGEST
        old: list[Hit] = []
        with self._lock:
            for request, held in self._hits.items():
                if held and held[0][0] < limit:
                    old += [hit for since, hit in held if since < limit]
                    self._hits[request] = [(since, hit) for since, hit in held if since >= limit]
        _close(old)

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            requests = list(self._hits)
        for request in requests:
            self.end(request)


class Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's own bookkeeping of lookups; it calls `batch_lookup` on a thread of its own.

    Args:
        tier_type: vLLM's name of the tier.
        rows: the chunks.
        pins: for what is found.
        wait: seconds that a load will wait for what is on its way; so much counts as found.
    """

    def __init__(self, tier_type: str, rows: TierRows, pins: Pins, wait: float) -> None:
        self._chunks, self._pins, self._wait = rows, pins, wait
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Sequence[bool]:
        rows = self._chunks.rows
        if rows is None:
            return [False] * len(keys)
        found: set[bytes] = set()
        for group in self._chunks.in_order(keys, req_context):
            at, empty, runs = 0, 0, 0
            while at < len(group) and empty < EMPTY and runs < RUNS:
                runs += 1
                hit = rows.match(rows.chain(group[at:]), wait=self._wait, again=at > 0)
                held = rows.held(hit)
                if held:
                    self._pins.hold(req_context.req_id, hit)
                else:
                    hit.close()
                    empty += 1
                found.update(group[at : at + held])
                at += held + 1
        return [key in found for key in keys]


def _close(hits: Sequence[Hit]) -> None:
    for hit in hits:
        hit.close()
