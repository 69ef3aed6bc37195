"""The way to the host's kvtier, which need not be there."""

from __future__ import annotations

import logging
import threading
from collections import Counter

import kvtier
from kvtier.client.cache import Cache
from kvtier.client.space import Space
from kvtier.connectors.vllm.messages import Recipe
from kvtier.connectors.vllm.options import Options
from kvtier.errors import ConfigError, KVTierError, SessionError

log = logging.getLogger("vllm.kvtier")
FIRST, LONGEST = 0.5, 10.0
"""Seconds between two attempts to reach a host that did not answer at the start."""
KEYSPACES = 256
"""That are kept open; LoRAs have one each."""


class Link:
    """A session with a host: opened when there is one, and never waited for. Thread-safe.

    Once it stands it attaches again by itself whenever the host comes back.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._cache: Cache | None = None
        self._spaces: dict[tuple[Recipe, int], Space] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.counters: Counter[str] = Counter()
        if not self._connected():
            threading.Thread(target=self._keep_trying, name="kvtier-connect", daemon=True).start()

    @property
    def cache(self) -> Cache | None:
        """The session; None while there is none."""
        return self._cache

    def space(self, recipe: Recipe, rank: int) -> Space | None:
        """A keyspace, for one rank; None while there is no session, or the host refuses it."""
        cache = self._cache
        if cache is None:
            return None
        with self._lock:
            space = self._spaces.get((recipe, rank))
            if space is None:
                try:
                    space = recipe.open(cache, rank)
                except (ConfigError, SessionError) as exc:
                    self._say(f"{exc}")
                    return None
                if len(self._spaces) >= KEYSPACES:
                    del self._spaces[next(iter(self._spaces))]
                self._spaces[recipe, rank] = space
            return space

    def computed(self, tokens: int, seconds: float) -> None:
        """Say how fast the engine computes; see `Space.computed`."""
        with self._lock:
            spaces = list(self._spaces.values())
        for space in spaces:
            space.computed(tokens, seconds)

    def close(self) -> None:
        """End the session; what is being saved ends first."""
        with self._lock:
            self._closed.set()
            cache, self._cache = self._cache, None
        if cache is not None:
            cache.close()

    def _connected(self) -> bool:
        options = self._options
        try:
            cache = kvtier.connect(options.target, threads=options.threads, token=options.token, ca=options.ca)
        except KVTierError as exc:
            self._say(f"{exc}; requests are computed meanwhile")
            return False
        with self._lock:
            if not self._closed.is_set():
                self._cache = cache
                return True
        cache.close()
        return True

    def _keep_trying(self) -> None:
        pause = FIRST
        while not self._closed.wait(pause) and not self._connected():
            pause = min(LONGEST, 2 * pause)

    def _say(self, what: str) -> None:
        """Log something once."""
        name = f"said: {what}"
        if not self.counters[name]:
            log.warning("kvtier: %s", what)
        self.counters[name] += 1
