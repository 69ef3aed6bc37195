"""How many different things there were, in a few kilobytes.

HyperLogLog (Flajolet et al., 2007) over 64-bit hashes, estimated as in Ertl, "New cardinality estimation algorithms for
HyperLogLog sketches" (2017): without bias from nothing to billions, with no table of corrections.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

PRECISION = 14
REGISTERS = 1 << PRECISION
"""Of one byte each; the standard error is 1.04 / 128, or 0.8 %."""
LONGEST = 64 - PRECISION + 1
"""What a register says at most: zeros in front of a hash's other bits, and one."""


class Sketch:
    """A set of 64-bit hashes that can be counted and merged. Not thread-safe.

    Attributes:
        registers: u8 `[2^14]`.
    """

    def __init__(self) -> None:
        self.registers = np.zeros(REGISTERS, np.uint8)

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Take note of hashes, which must be uniform."""
        places = (hashes >> np.uint64(64 - PRECISION)).astype(np.int64)
        # One bit behind the others, so that there always is one; 51 bits are exact in a double.
        rest = ((hashes << np.uint64(PRECISION)) >> np.uint64(PRECISION - 1)) | np.uint64(1)
        zeros = LONGEST - np.frexp(rest.astype(np.float64))[1]
        np.maximum.at(self.registers, places, (zeros + 1).astype(np.uint8))

    @classmethod
    def union(cls, sketches: Iterable[Sketch]) -> Sketch:
        """Of all that these have seen."""
        both = cls()
        for one in sketches:
            np.maximum(both.registers, one.registers, out=both.registers)
        return both

    def __len__(self) -> int:
        """About how many different hashes there were; exact, as a rule, of some dozens."""
        counts = np.bincount(self.registers, minlength=LONGEST + 1).tolist()
        z = REGISTERS * _tau(1 - counts[LONGEST] / REGISTERS)
        for count in counts[LONGEST - 1 : 0 : -1]:
            z = (z + count) / 2
        z += REGISTERS * _sigma(counts[0] / REGISTERS)
        return round(REGISTERS**2 / (2 * math.log(2) * z)) if math.isfinite(z) else 0


def _sigma(x: float) -> float:
    """The share of empty registers, corrected; `x` of them are empty."""
    if x == 1.0:
        return math.inf
    y, z, before = 1.0, x, math.nan
    while z != before:
        x *= x
        before = z
        z += x * y
        y += y
    return z


def _tau(x: float) -> float:
    """The share of full registers, corrected; `x` of them are not full."""
    if x in (0.0, 1.0):
        return 0.0
    y, z, before = 1.0, 1 - x, math.nan
    while z != before:
        x = math.sqrt(x)
        before = z
        y /= 2
        z -= (1 - x) ** 2 * y
    return z / 3
