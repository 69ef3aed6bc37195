"""A tier in a process of its own, served to one hierarchy."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from kvtier.errors import ConfigError, KVTierError, SessionUnavailable, TierUnavailable
from kvtier.memory.arena import Arena
from kvtier.memory.lock import FileLock
from kvtier.tiers.base import Tier
from kvtier.tiers.shared import SharedTier
from kvtier_services.actors import wire
from kvtier_services.actors.fence import arena_mark, lock_path

LOCK_PATIENCE = 10.0
"""Seconds that a restarted process waits for the one before it to be gone."""
DRAIN_PATIENCE = 10.0
"""Seconds that a new hierarchy waits for what was under way for the one before it."""

KEYS_TOLD = 1024
"""Evicted keys that one answer tells at most."""


class TierService:
    """Serves one tier; the tier is opened when the first hierarchy introduces itself.

    Every call but `hello`, `ping` and `stop` carries the pass that `hello` gave; all others are refused with
    `TierUnavailable`. Thread-safe.
    """

    def __init__(self, name: str, arena_dir: Path, open_tier: Callable[[Arena], Tier]) -> None:
        """Serve nobody yet.

        Args:
            name: of the tier.
            arena_dir: folder of the host's arena.
            open_tier: opens the tier over the attached arena.
        """
        self._name = name
        self._arena_dir = arena_dir
        self._open_tier = open_tier
        self._lock: FileLock | None = None
        self._tier: Tier | None = None
        self._arena = ""
        self._pass = ""
        self._guard = threading.Condition()
        """Guards `_pass`, `_busy` and who may say hello; never held during I/O."""
        self._busy = 0
        self._untold: list[bytes] = []
        self._greeting = threading.Lock()

    def ping(self) -> dict[str, Any]:
        """Who this is."""
        return {"pid": os.getpid()}

    def hello(self, arena: str) -> dict[str, Any]:
        """A hierarchy introduces itself: from now on it is the only one that is answered.

        Args:
            arena: `arena_mark` of its arena.

        Returns:
            `pass` for all other calls, `pid`, `notes` on the tier's opening, and of a tier whose memory engines may
            read its `epoch` and `handle`.

        Raises:
            TierUnavailable: this process cannot serve it now; the message says why.
        """
        with self._greeting:
            self._drain()
            try:
                self._attach(arena)
            except (KVTierError, OSError) as exc:
                raise TierUnavailable(f"the {self._name} tier: {exc}") from exc
            with self._guard:
                self._untold.clear()
                self._pass = secrets.token_hex(8)
            notes = list(getattr(self._tier, "notes", ()))
            memory = {"epoch": 0, "handle": b""}
            if self._shares:
                tier = cast("SharedTier", self._tier)
                memory = {"epoch": tier.epoch, "handle": tier.share()}
            return {"pass": self._pass, "pid": os.getpid(), "notes": notes, **memory}

    def write(self, number: str, keys: bytes, slots: bytes) -> bytes:
        """See `Tier.write`."""
        with self._serving(number) as tier:
            stored = tier.write(wire.split(keys), wire.unpack_slots(slots))
            return wire.pack_answer(stored, self._evicted(tier))

    def read(self, number: str, keys: bytes, slots: bytes) -> bytes:
        """See `Tier.read`."""
        with self._serving(number) as tier:
            whole = tier.read(wire.split(keys), wire.unpack_slots(slots))
            return wire.pack_answer(whole, self._evicted(tier))

    def remove(self, number: str, keys: bytes) -> None:
        """See `Tier.remove`."""
        with self._serving(number) as tier:
            tier.remove(wire.split(keys))

    def contains(self, number: str, keys: bytes) -> bytes:
        """See `Tier.contains`."""
        with self._serving(number) as tier:
            return bytes(tier.contains(wire.split(keys)))

    def inventory(self, number: str) -> bytes:
        """See `Tier.inventory`."""
        with self._serving(number) as tier:
            return wire.pack_inventory(tier.inventory())

    def places(self, number: str, keys: bytes) -> bytes:
        """See `SharedTier.places`."""
        with self._serving(number) as tier:
            return wire.pack_places(cast("SharedTier", tier).places(wire.split(keys)))

    def usage(self, number: str) -> tuple[dict[str, Any], bytes]:
        """See `Tier.usage`; with keys that the tier evicted and that were not told yet."""
        with self._serving(number) as tier:
            return asdict(tier.usage()), wire.join(self._evicted(tier))

    def stop(self) -> None:
        """Finish what is under way, close the tier and let go of the arena."""
        with self._greeting:
            self._drain()
            self._leave()

    @property
    def _shares(self) -> bool:
        return hasattr(self._tier, "places")

    def _evicted(self, tier: Tier) -> list[bytes]:
        """Some of the keys that the tier evicted; a whole region's go in several answers, so that none is large."""
        with self._guard:
            self._untold += tier.dropped()
            told, self._untold = self._untold[:KEYS_TOLD], self._untold[KEYS_TOLD:]
        if not told:
            return []
        return [key for key, stored in zip(told, tier.contains(told), strict=True) if not stored]

    @contextmanager
    def _serving(self, number: str) -> Iterator[Tier]:
        with self._guard:
            if self._tier is None or number != self._pass:
                raise TierUnavailable(f"the {self._name} tier's process was restarted, or serves another hierarchy")
            tier = self._tier
            self._busy += 1
        try:
            yield tier
        finally:
            with self._guard:
                self._busy -= 1
                self._guard.notify_all()

    def _drain(self) -> None:
        """Admit nobody, and wait until nothing is under way."""
        with self._guard:
            self._pass = ""
            if not self._guard.wait_for(lambda: not self._busy, DRAIN_PATIENCE):
                raise TierUnavailable(f"the {self._name} tier is still busy for the hierarchy before this one")

    def _attach(self, arena: str) -> None:
        if self._tier is not None and self._arena == arena:
            return
        self._leave()
        mark, attached = arena_mark(self._arena_dir), Arena.attach(self._arena_dir, writable=True)
        if not mark == arena_mark(self._arena_dir) == arena:
            raise SessionUnavailable(f"the arena in {self._arena_dir} is not the one of the hierarchy that asks")
        self._lock = FileLock(lock_path(self._arena_dir, self._name))
        if not self._lock.acquire(LOCK_PATIENCE):
            self._leave()
            raise ConfigError("another process serves this arena")
        self._lock.note(str(os.getpid()))
        try:
            self._tier, self._arena = self._open_tier(attached), arena
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        if self._tier is not None:
            self._tier.close()
        if self._lock is not None:
            self._lock.close()
        self._tier, self._lock, self._arena = None, None, ""
