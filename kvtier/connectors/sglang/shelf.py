"""The pages of one host pool in the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.client.rows import RowMemory, Rows
from kvtier.connectors.link import Link, Opened
from kvtier.connectors.sglang.pools import HostPool
from kvtier.errors import SessionUnavailable


class Shelf:
    """Stores and loads pages of one pool by SGLang's names. Thread-safe; nothing raises for the host's sake.

    Args:
        link: to the host, which need not be there.
        pool: whose pages.
        wait: seconds that a batch may wait for what must first be brought up.
        identity: what else names the keyspace.
    """

    def __init__(self, link: Link, pool: HostPool, *, wait: float, identity: Mapping[str, Any]) -> None:
        self._wait, self._identity = wait, dict(identity)
        self.pool = pool
        memory = pool.memory or RowMemory.of(np.empty((1, pool.nbytes), np.uint8))
        self._spec = memory.prepare(pool.page_tokens)
        layout = pool.layout
        self._rows = Opened(link, lambda cache: Rows(cache, self._spec, layout=layout, **self._identity))

    @property
    def rows(self) -> Rows | None:
        """The keyspace; None while the host is not there, or refuses it."""
        return self._rows.get()

    def held(self, names: Sequence[str]) -> int:
        """How many leading pages are there, or on their way."""
        rows = self.rows
        if rows is None or not names:
            return 0
        with rows.match(rows.chain(_bytes(names)), wait=self._wait) as hit:
            return rows.held(hit)

    def load(self, names: Sequence[str], memory: RowMemory, table: NDArray[np.int64]) -> list[bool]:
        """Load pages into rows of memory; which of them were there. SGLang asked for them before, by `held`."""
        rows = self.rows
        if rows is None:
            return [False] * len(names)
        view = memory.view(self._spec, table)
        found: list[bool] = rows.load(rows.chain(_bytes(names)), view, wait=self._wait, again=True).tolist()
        return found

    def save(self, names: Sequence[str], memory: RowMemory, table: NDArray[np.int64], before: Sequence[str]) -> bool:
        """Store pages, and wait for it: SGLang uses their memory again. Whether all of them are there.

        Args:
            names: of the pages.
            memory: where they are.
            table: which of its rows.
            before: names of the pages before them in their sequence, as far as SGLang says.
        """
        rows = self.rows
        if rows is None:
            return False
        last = before[-1:]
        saved = rows.save(rows.chain(_bytes([*last, *names])), memory.view(self._spec, table), start=len(last)).result()
        return not saved.refused

    def clear(self) -> int:
        """Drop all pages of this pool, of all ranks, for good; how many.

        Raises:
            SessionError: the host did not answer, so they may be there still.
        """
        rows = self.rows
        if rows is None:
            raise SessionUnavailable("kvtier does not answer; what is stored there stays")
        return rows.clear()


def _bytes(names: Sequence[str]) -> list[bytes]:
    return [name.encode() for name in names]
