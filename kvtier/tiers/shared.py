"""What a tier can do whose memory engines read themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PLACE = np.dtype([("offset", "<i8"), ("generation", "<u4")])
"""Where a payload is in the tier's memory, and of which generation its slot is; offset -1 for nowhere."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where payloads are.

    Attributes:
        epoch: of the memory.
        slots: `PLACE` array, in the order of the keys that were asked for.
    """

    epoch: int
    slots: NDArray[Any]


class SharedTier(Protocol):
    """A `Tier` in memory that has a handle: see `kvtier.memory.device`.

    A slot keeps its place until its key is removed; its generation moves on before it is granted again.
    """

    @property
    def epoch(self) -> int:
        """Of the memory; 0 while there is none. Answers at once."""
        ...

    def share(self) -> bytes:
        """The handle; empty while there is none. Answers at once."""
        ...

    def places(self, keys: Sequence[bytes]) -> Places:
        """Where these keys are."""
        ...
