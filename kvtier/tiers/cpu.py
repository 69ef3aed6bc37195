"""The CPU tier: payloads in slots of the arena itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.block import ALIGN, FIELDS, KEY_NBYTES, MAGIC, PAGE, VERSION, slot_nbytes
from kvtier.memory.arena import Arena
from kvtier.memory.pool import SlotPool
from kvtier.tiers.base import STORED, TierUsage


class CpuTier:
    """Slots of the arena, granted and taken back.

    It is not a `Tier`: other tiers copy payloads from and to slots, here the slot is the place. Not thread-safe: used
    under the hierarchy's lock.

    Slots that a session was writing into are quarantined when the session is cut off: it may still be alive. They are
    in the arena's `writers` table, so that a new owner of the arena finds them too.
    """

    name = "cpu"

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.pool = SlotPool(arena.ready, total=arena.capacity)
        self.quarantined: dict[int, list[int]] = {}
        self._adopt(0)

    def grow(self) -> None:
        """Grant from all that the arena has ready by now."""
        before = self.pool.capacity
        self.pool.grow(self.arena.ready)
        if self.pool.capacity > before:
            self._adopt(before)

    def grant(self, nbytes: int, writer: int = 0) -> tuple[int, int] | None:
        """A slot under a new generation, as (offset, generation); None when there is no room.

        Args:
            nbytes: of the payload.
            writer: session that will write into it; 0 when a tier does.
        """
        offset = self.pool.allocate(nbytes)
        if offset is None:
            return None
        if writer:
            self._mark(offset, nbytes, writer)
        return offset, self.arena.renew(offset, nbytes)

    def headers(
        self, keys: Sequence[bytes], offsets: Sequence[int], nbytes: Sequence[int]
    ) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        """What the headers of the payloads in these slots say.

        Returns:
            For each whether it is a whole one of this key and size, and a `STORED` array.
        """
        memory, starts, sizes = self.arena.memory, np.array(offsets, np.int64), np.array(nbytes, np.int64)
        raw = memory[starts[:, None] + np.arange(FIELDS.itemsize)]
        fields = raw.view(FIELDS)[:, 0]
        own = fields["size"].astype(np.int64)
        addresses = np.frombuffer(b"".join(keys), np.dtype([("key", f"V{KEY_NBYTES}"), ("rank", "<u2")]))
        whole: NDArray[np.bool_] = (fields["magic"] == MAGIC) & (fields["version"] == VERSION)
        whole &= (fields["key"] == addresses["key"]) & (fields["rank"] == addresses["rank"])
        whole &= (own % ALIGN == 0) & (own > FIELDS.itemsize) & (own <= np.minimum(sizes, PAGE))
        whole &= fields["body"] == (sizes - own).astype(np.uint64)
        for i in np.flatnonzero(whole).tolist():
            front = memory[offsets[i] : offsets[i] + int(own[i])].data
            whole[i] = xxhash.xxh3_64_intdigest(front[:-8]) == int.from_bytes(front[-8:], "little")
        records = np.zeros(len(keys), STORED)
        records["nbytes"] = sizes
        for name in ("tokens", "codec", "space", "expires"):
            records[name] = fields[name]
        return whole, records

    def written(self, offset: int, nbytes: int) -> None:
        """The session that was granted this slot no longer writes into it."""
        self._mark(offset, nbytes, 0)

    def quarantine(self, writer: int, offsets: list[int]) -> None:
        """Keep these slots from everybody until `writer` is known to have stopped."""
        if offsets:
            self.quarantined.setdefault(writer, []).extend(offsets)

    def absolve(self, writer: int) -> int:
        """This session writes no more: its quarantined slots are free; how many they were."""
        offsets = self.quarantined.pop(writer, [])
        if offsets:
            self.arena.writers[self.arena.writers == writer] = 0
            self.pool.release(np.array(offsets, np.int64))
        return len(offsets)

    def usage(self) -> TierUsage:
        """How full it is."""
        held = sum(map(len, self.quarantined.values()))
        return TierUsage(self.pool.capacity, self.pool.used, self.pool.blocks - held, counters={"quarantined": held})

    def _mark(self, offset: int, nbytes: int, writer: int) -> None:
        self.arena.writers[offset // PAGE : (offset + slot_nbytes(nbytes)) // PAGE] = writer

    def _adopt(self, first: int) -> None:
        """Quarantine what sessions of a former owner may be writing into, from byte `first` of the pool on.

        Nothing there was granted in this life, so all marks are of a former one. They are claimed unit by unit.
        """
        pages = slice(first // PAGE, self.pool.capacity // PAGE)
        marked = np.flatnonzero(self.arena.writers[pages]) + pages.start
        for units in _runs(np.unique(marked * PAGE // self.pool.unit)):
            start, nbytes = int(units[0]) * self.pool.unit, len(units) * self.pool.unit
            marks = np.unique(self.arena.writers[start // PAGE : (start + nbytes) // PAGE])
            writers = marks[marks > 0].tolist()
            offset = self.pool.claim(start, nbytes, len(writers))
            for writer in writers:
                self.quarantine(writer, [offset])


def _runs(numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split sorted numbers into runs of consecutive ones."""
    return [run for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1) if run.size]
