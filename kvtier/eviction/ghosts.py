"""Blocks that are remembered without their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GHOSTS = 1 << 20
"""Blocks that are remembered, 8 bytes each."""
WAYS = 8
"""Places that a block may be remembered in; when others took them all, the oldest is forgotten."""
ADDRESS = np.dtype([("number", "<u8"), ("rest", "V24"), ("rank", "<u2")])
SPREAD = np.uint64(0x9E3779B97F4A7C15)


def numbers_of(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    """Of 34-byte addresses the first 64 bits, of SHA-256 and so as good as random; other ranks get others."""
    addresses = np.frombuffer(b"".join(keys), ADDRESS)
    numbers: NDArray[np.uint64] = addresses["number"] ^ (addresses["rank"].astype(np.uint64) * SPREAD)
    return numbers


class Ghosts:
    """A set of block numbers of bounded size: who comes late takes the place of the oldest of its few. Not thread-safe.

    Block 0 cannot be told from an empty place; no SHA-256 that anybody knows begins with so many zeros.
    """

    def __init__(self, most: int = GHOSTS) -> None:
        """Take how many there are room for, a multiple of `WAYS`."""
        self._places = np.zeros((most // WAYS, WAYS), np.uint64)

    def remember(self, blocks: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Remember blocks; which of them were remembered already, and keep their places."""
        places, sets = self._places, self._sets(blocks)
        known: NDArray[np.bool_] = (places[sets] == blocks[:, None]).any(1)
        new = np.flatnonzero(~known)
        while len(new):
            _, first = np.unique(sets[new], return_index=True)
            place = sets[new[first]]
            places[place, 1:] = places[place, :-1]
            places[place, 0] = blocks[new[first]]
            new = np.delete(new, first)
        return known

    def forget(self, blocks: NDArray[np.uint64]) -> int:
        """Remember these no more; how many were remembered."""
        sets = self._sets(blocks)
        row, way = np.nonzero(self._places[sets] == blocks[:, None])
        forgotten = len(np.unique(blocks[row]))
        self._places[sets[row], way] = 0
        return forgotten

    def _sets(self, blocks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return blocks % np.uint64(len(self._places))
