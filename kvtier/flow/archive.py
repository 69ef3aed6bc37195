"""A session's approximate KV, kept as a whole."""

from __future__ import annotations

import struct
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.client.cache import Cache
from kvtier.client.pools import secret_of
from kvtier.client.rows import RowMemory, Rows
from kvtier.client.save import Saved
from kvtier.client.space import Space
from kvtier.errors import SessionError

ROW_NBYTES = 256 << 10
LAYOUT = "opaque:kvtier/flow/1"
HEAD = struct.Struct("<8sQQ")
MAGIC = b"KVTFLOW1"
LARGEST = 1 << 36
"""Bytes of a state."""


class Archive:
    """Where the state of flows is kept, for one session.

    What became of a context under a recipe answers for nothing else: it is stored under the recipe and the digest of
    the whole context, with the session's secret, as rows of bytes. So it is nowhere near a chain of exact blocks: it
    has no prefix and no children.

    Args:
        cache: of the host.
        space: any space of the model: names the model, its weights, and what else changes KV.
        session: secret that keys are salted with. Who knows it, and the context's name, finds the state.

    Attributes:
        spec: of the space.

    Raises:
        ConfigError: no secret.
    """

    def __init__(self, cache: Cache, space: Space, session: str) -> None:
        self.spec = space.keyspace.spec
        self._cache, self._session, self._of = cache, secret_of(session), space.keyspace
        self._memory_spec = RowMemory.of(np.empty((1, ROW_NBYTES), np.uint8)).prepare(1)

    def save(self, recipe: str, state: NDArray[np.uint8]) -> Future[Saved]:
        """Store a copy of a state in the background.

        Args:
            recipe: what makes it what it is: `Recipe.text`.
            state: bytes, one dimension.
        """
        count = -(-(HEAD.size + state.nbytes) // ROW_NBYTES)
        rows = np.zeros((count, ROW_NBYTES), np.uint8)
        flat = rows.reshape(-1)
        head = HEAD.pack(MAGIC, state.nbytes, xxhash.xxh3_64_intdigest(state.data))
        flat[: HEAD.size] = np.frombuffer(head, np.uint8)
        flat[HEAD.size : HEAD.size + state.nbytes] = state
        kept = self._rows(recipe)
        view = RowMemory.of(rows).view(kept.spec, np.arange(count))
        return kept.save(kept.chain(_names(count)), view)

    def load(self, recipe: str, *, wait: float = 0.0) -> NDArray[np.uint8] | None:
        """What was saved under this recipe; None when it is not there as a whole.

        Args:
            recipe: as for `save`.
            wait: seconds that it may take when it must first be brought up from another tier.
        """
        kept, until = self._rows(recipe), time.monotonic() + wait
        first = self._read(kept, 1, wait)
        if first is None:
            return None
        magic, nbytes, checksum = HEAD.unpack(first[: HEAD.size].tobytes())
        if magic != MAGIC or nbytes > LARGEST:
            self.condemn(recipe, "unreadable")
            return None
        whole = self._read(kept, -(-(HEAD.size + nbytes) // ROW_NBYTES), max(0.0, until - time.monotonic()))
        if whole is None:
            return None
        state = whole[HEAD.size : HEAD.size + nbytes]
        if xxhash.xxh3_64_intdigest(state.data) != checksum:
            self.condemn(recipe, "checksum")
            return None
        return state

    def condemn(self, recipe: str, why: str) -> None:
        """Count a state that is there and cannot be used, and drop it, so that another can take its place."""
        self._cache.counters[f"archive_{why}"] += 1
        try:
            self._rows(recipe).clear()
        except SessionError as exc:
            self._cache.counters[f"archive_{type(exc).__name__}"] += 1

    def _read(self, kept: Rows, count: int, wait: float) -> NDArray[np.uint8] | None:
        rows = np.empty((count, ROW_NBYTES), np.uint8)
        view = RowMemory.of(rows).view(kept.spec, np.arange(count))
        loaded = kept.load(kept.chain(_names(count)), view, wait=wait)
        return rows.reshape(-1) if loaded.all() else None

    def _rows(self, recipe: str) -> Rows:
        of = self._of
        parts: dict[str, Any] = {
            "model": of.model,
            "revision": of.revision,
            "overrides": {**of.overrides, "kvtier.spec": of.spec.canonical().hex(), "kvtier.plan": of.plan},
            "kv_scales": of.kv_scales,
            "adapter": of.adapter,
            "adapter_digest": of.adapter_digest,
        }
        return Rows(self._cache, self._memory_spec, layout=LAYOUT, tenant=self._session, recipe=recipe, **parts)


def _names(count: int) -> list[bytes]:
    return [struct.pack("<I", number) for number in range(count)]
