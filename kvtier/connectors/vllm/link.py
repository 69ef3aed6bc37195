"""The keyspaces of one engine on a host's kvtier, which need not be there."""

from __future__ import annotations

import logging
import threading

import kvtier
from kvtier.client.cache import Cache
from kvtier.client.space import Space
from kvtier.connectors import link
from kvtier.connectors.vllm.messages import Recipe
from kvtier.connectors.vllm.options import Options
from kvtier.errors import ConfigError, SessionError

log = logging.getLogger("vllm.kvtier")
KEYSPACES = 256
"""That are kept open; LoRAs have one each."""


class Link:
    """A `kvtier.connectors.link.Link` with what an engine opens on it. Thread-safe."""

    def __init__(self, options: Options) -> None:
        self._spaces: dict[tuple[Recipe, int], Space] = {}
        self._lock = threading.Lock()
        self._link = link.Link(
            lambda: kvtier.connect(options.target, threads=options.threads, token=options.token, ca=options.ca),
            lambda what: log.warning("kvtier: %s", what),
        )

    @property
    def cache(self) -> Cache | None:
        """The session; None while there is none."""
        return self._link.cache

    def space(self, recipe: Recipe, rank: int) -> Space | None:
        """A keyspace, for one rank; None while there is no session, or the host refuses it."""
        cache = self.cache
        if cache is None:
            return None
        with self._lock:
            space = self._spaces.get((recipe, rank))
        if space is None:
            try:
                space = recipe.open(cache, rank)  # may wait for a host that is attached to: nobody else need
            except (ConfigError, SessionError) as exc:
                self._link.say(f"{exc}")
                return None
            with self._lock:
                if len(self._spaces) >= KEYSPACES:
                    del self._spaces[next(iter(self._spaces))]
                self._spaces[recipe, rank] = space
        return space

    def say(self, what: str) -> None:
        """Tell people, once."""
        self._link.say(what)

    def computed(self, tokens: int, seconds: float) -> None:
        """Say how fast the engine computes; see `Space.computed`."""
        with self._lock:
            spaces = list(self._spaces.values())
        for space in spaces:
            space.computed(tokens, seconds)

    def close(self) -> None:
        """End the session; what is being saved ends first."""
        self._link.close()
