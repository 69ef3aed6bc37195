"""One row a block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.block import SPACE_NBYTES
from kvtier.tiers.base import TierNumber

GROWTH = 1024
SIZES = 256
COOLING = 60.0
"""Seconds over which a hit is forgotten."""


class BlockTable:
    """What the host knows of each block, in columns, so that a chain of thousands is a few array operations.

    Rows are small integers that policies use as names; a removed row's number is used again. Not thread-safe.

    Attributes:
        offset: slot of the block in the arena; -1 when the CPU tier does not have it.
        generation: of that slot.
        inside, inside_generation: the same in the GPU tier's memory, see `DeviceSlots`; -1 when it is not known.
        nbytes: payload bytes.
        tiers: bit `1 << TierNumber` for each tier that has it.
        created, used: seconds since the epoch.
        hits: how often it was leased.
        heat: hits a minute of late, as of `used`; ask `heat_of`.
        uses: how often eviction was told that it was used.
        came: tier from which it was brought up for somebody who has not had it yet; 0 for none.
        tokens, codec: tokens in it and number of its codec; 0 when not known.
        space: number of the keyspace that it belongs to, see `space_number`.
        expires: seconds since the epoch after which nobody may be given it; 0 for never.
        parent: row of the block before it; -1 for none or unknown; ask `parent_of`.
        life: how often the row's number was given to a block; a parent is remembered with its life.
        soonest: no block expires before this.
        usual: tokens in the last block of each size that came, for blocks of which only the size is known.
    """

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {}
        self.keys: list[bytes] = []
        self._spare: list[int] = []
        self._spaces: dict[bytes, int] = {}
        self.soonest = np.inf
        self.usual: dict[int, int] = {}
        self.offset = np.full(GROWTH, -1, np.int64)
        self.generation = np.zeros(GROWTH, np.uint32)
        self.inside = np.full(GROWTH, -1, np.int64)
        self.inside_generation = np.zeros(GROWTH, np.uint32)
        self.nbytes = np.zeros(GROWTH, np.int64)
        self.tiers = np.zeros(GROWTH, np.uint8)
        self.created = np.zeros(GROWTH, np.float64)
        self.used = np.zeros(GROWTH, np.float64)
        self.hits = np.zeros(GROWTH, np.int64)
        self.heat = np.zeros(GROWTH, np.float64)
        self.uses = np.zeros(GROWTH, np.int64)
        self.came = np.zeros(GROWTH, np.uint8)
        self.tokens = np.zeros(GROWTH, np.int64)
        self.codec = np.zeros(GROWTH, np.uint16)
        self.space = np.zeros(GROWTH, np.uint32)
        self.expires = np.zeros(GROWTH, np.uint64)
        self.parent = np.full(GROWTH, -1, np.int64)
        self.parent_life = np.zeros(GROWTH, np.int64)
        self.life = np.zeros(GROWTH, np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def prefix(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """Rows of the longest prefix of `keys` that is known."""
        rows = list(map(self.rows.get, keys))
        with suppress(ValueError):
            del rows[rows.index(None) :]
        return np.array(rows, np.int64)

    def add(self, key: bytes, nbytes: int, parent: int, now: float) -> int:
        """A new row; the key must be unknown."""
        if self._spare:
            row = self._spare.pop()
            self.keys[row] = key
        else:
            row = len(self.keys)
            self.keys.append(key)
            if row == len(self.offset):
                self._grow()
        self.rows[key] = row
        self.offset[row] = self.inside[row] = -1
        self.nbytes[row] = nbytes
        self.tiers[row] = 0
        self.created[row] = self.used[row] = now
        self.hits[row] = self.came[row] = 0
        self.heat[row] = 0.0
        self.tokens[row] = self.codec[row] = self.expires[row] = 0
        self.space[row] = self.space_number(bytes(SPACE_NBYTES))
        self.life[row] += 1
        self.parent[row] = -1
        if parent >= 0:
            self.adopt(row, parent)
        return row

    def hit(self, rows: NDArray[np.int64], now: float) -> None:
        """These were leased."""
        self.heat[rows] = self.heat_of(rows, now) + 1.0
        self.hits[rows] += 1
        self.used[rows] = now

    def heat_of(self, rows: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Hits a minute of late: of hits that come evenly, what it tends to is their rate."""
        found: NDArray[np.float64] = self.heat[rows] * np.exp(-np.maximum(0.0, now - self.used[rows]) / COOLING)
        return found

    def note(self, rows: list[int], said: NDArray[Any]) -> None:
        """What these blocks' headers say (a `STORED` array) is known now."""
        self.tokens[rows], self.codec[rows], self.expires[rows] = said["tokens"], said["codec"], said["expires"]
        self.space[rows] = [self.space_number(space) for space in said["space"].tolist()]
        if len(self.usual) > SIZES:
            self.usual.clear()
        self.usual.update(zip(said["nbytes"][-1:].tolist(), said["tokens"][-1:].tolist(), strict=True))
        ends = said["expires"][said["expires"] > 0]
        if len(ends):
            self.soonest = min(self.soonest, float(ends.min()))

    def alive(self, rows: NDArray[np.int64], now: float) -> int:
        """How many of these blocks, from the first on, may still be given away."""
        if now < self.soonest:
            return len(rows)
        ends = self.expires[rows]
        over = (ends > 0) & (ends <= now)
        return int(np.argmax(over)) if over.any() else len(rows)

    def space_number(self, space: bytes) -> int:
        """A number for a keyspace, the same every time."""
        return self._spaces.setdefault(space, len(self._spaces))

    def known_space(self, space: bytes) -> int:
        """Its number; -1 for a keyspace that no block is of."""
        return self._spaces.get(space, -1)

    def space_names(self) -> list[bytes]:
        """The keyspaces, by their numbers."""
        return list(self._spaces)

    def parent_of(self, row: int) -> int | None:
        """Row of the block before it, if that is still known."""
        parent = int(self.parent[row])
        return parent if parent >= 0 and self.life[parent] == self.parent_life[row] else None

    def adopt(self, row: int, parent: int) -> None:
        """Row of the block before it became known."""
        self.parent[row], self.parent_life[row] = parent, self.life[parent]

    def strangers(self, rows: NDArray[np.int64]) -> list[int]:
        """Places (from 1) in a chain of rows where a row does not know that the one before it is its parent."""
        parents, children = rows[:-1], rows[1:]
        known = (self.parent[children] == parents) & (self.parent_life[children] == self.life[parents])
        places: list[int] = (np.flatnonzero(~known) + 1).tolist()
        return places

    def remove(self, row: int) -> bytes:
        """Forget a row; returns its key."""
        key = self.keys[row]
        del self.rows[key]
        self.life[row] += 1
        self._spare.append(row)
        return key

    def has(self, row: int, tier: TierNumber) -> bool:
        """Whether this tier has the block."""
        return bool(int(self.tiers[row]) >> tier & 1)

    def best_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `best`."""
        masks = self.tiers[rows].astype(np.int64)
        lowest: NDArray[np.int64] = np.bitwise_count((masks & -masks) - 1).astype(np.int64)
        return np.where(masks > 0, lowest, 0)

    def best(self, row: int) -> int:
        """The fastest tier that has the block; 0 when none has."""
        mask = int(self.tiers[row])
        return (mask & -mask).bit_length() - 1 if mask else 0

    def _grow(self) -> None:
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.resize(column, 2 * len(column)))
