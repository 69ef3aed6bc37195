"""A session with a hierarchy in the same process."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import DeadlineExceeded
from kvtier.hierarchy.answers import Matched, Placement, Reserved
from kvtier.hierarchy.cache import Hierarchy
from kvtier.hierarchy.loading import Wish
from kvtier.memory.device import DeviceMemory, attach
from kvtier.tiers.base import TierNumber

_numbers = itertools.count(1)


class LocalSession:
    """`Session` without a server: for tests, notebooks and single-process use."""

    salt = ""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy
        self._number = next(_numbers)
        self.epoch = hierarchy.arena.epoch
        hierarchy.attach(self._number, f"{Path(sys.argv[0]).name} pid {os.getpid()}")
        self._readable = hierarchy.arena.memory.view()
        self._readable.flags.writeable = False
        self._generations = hierarchy.arena.generations.view()
        self._generations.flags.writeable = False

    def claim(self, keyspace: bytes) -> None:
        """See `Session`."""

    def readable(self) -> NDArray[np.uint8]:
        """See `Session`."""
        return self._readable

    def writable(self) -> NDArray[np.uint8]:
        """See `Session`."""
        return self._hierarchy.arena.memory

    def generations(self) -> NDArray[np.uint32]:
        """See `Session`."""
        return self._generations

    def attach(self, device: str) -> DeviceMemory | str:
        """See `Session`."""
        attached = attach(self._hierarchy.state.device.handle(), device)
        if isinstance(attached, str) and attached:
            self._hierarchy.refused()
        return attached

    def match(
        self,
        keys: Sequence[bytes],
        wait: float,
        *,
        prefill: float = 0.0,
        stream: bool = False,
        after: int = 0,
        device: int = 0,
        again: bool = False,
    ) -> Matched:
        """See `Session`."""
        first = not stream or wait == 0
        return self._hierarchy.match(Wish(self._number, keys, prefill, stream, after, first, device, again), wait)

    def fetch(self, lease: int, first: int, end: int) -> int:
        """See `Session`."""
        return end - first

    def release(self, lease: int, seconds: float = 0.0, part: float = 1.0) -> None:
        """See `Session`."""
        self._hierarchy.release(lease, seconds, part)

    def reserve(self, keys: Sequence[bytes], nbytes: Sequence[int], start: int) -> Reserved:
        """See `Session`."""
        return self._hierarchy.reserve(self._number, keys, nbytes, start)

    def writing(self) -> AbstractContextManager[None]:
        """See `Session`."""
        return nullcontext()

    def commit(self, ticket: int, written: Sequence[int], seconds: float = 0.0, raw: int = 0) -> list[bool]:
        """See `Session`."""
        return self._hierarchy.commit(self._number, ticket, written, seconds, raw)

    def condemn(self, keys: Sequence[bytes], why: str) -> None:
        """See `Session`."""
        self._hierarchy.condemn(keys, why)

    def move(self, keys: Sequence[bytes], tier: TierNumber, wait: float) -> int:
        """See `Session`."""
        try:
            return self._hierarchy.move(keys, tier).result(wait)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"moving {len(keys)} blocks takes longer than {wait} s; it goes on") from exc

    def prefetch(self, keys: Sequence[bytes], tier: TierNumber) -> Future[int]:
        """See `Session`."""
        return self._hierarchy.prefetch(keys, tier)

    def pin(self, keys: Sequence[bytes], seconds: float) -> int:
        """See `Session`."""
        return self._hierarchy.pin(self._number, keys, seconds).result()

    def unpin(self, keys: Sequence[bytes]) -> int:
        """See `Session`."""
        return self._hierarchy.unpin(keys)

    def evict(self, keys: Sequence[bytes]) -> int:
        """See `Session`."""
        return self._hierarchy.evict(keys)

    def clear(self, space: bytes) -> int:
        """See `Session`."""
        return self._hierarchy.clear(space)

    def inspect(self, keys: Sequence[bytes]) -> list[dict[str, Any] | None]:
        """See `Session`."""
        return self._hierarchy.inspect(keys)

    def where(self, keys: Sequence[bytes]) -> Placement:
        """See `Session`."""
        return self._hierarchy.where(keys)

    def status(self) -> dict[str, Any]:
        """See `Session`."""
        return self._hierarchy.status()

    def close(self) -> None:
        """See `Session`."""
        self._hierarchy.detach(self._number)
