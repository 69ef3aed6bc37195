"""What every tier can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.block import SPACE_NBYTES, BlockHeader
from kvtier.errors import CorruptPayload


class TierNumber(IntEnum):
    """Tiers as they travel and as the index stores them; it never stores `PEER`, which is all other hosts."""

    GPU = 1
    CPU = 2
    NVME = 3
    PEER = 4


OWN = (TierNumber.GPU, TierNumber.CPU, TierNumber.NVME)
"""The tiers of a host itself."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Byte ranges of the host's arena, in the order of the keys that they go with.

    Attributes:
        offsets: int64, where each slot begins; a multiple of 4096.
        nbytes: int64, length of each payload; the slot behind it is this rounded up to 4096.
    """

    offsets: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets)

    @classmethod
    def of(cls, offsets: Sequence[int], nbytes: Sequence[int]) -> Slots:
        """Build from any sequences of integers."""
        return cls(np.asarray(offsets, np.int64), np.asarray(nbytes, np.int64))


STORED = np.dtype(
    [("nbytes", "<u4"), ("tokens", "<u4"), ("space", f"V{SPACE_NBYTES}"), ("expires", "<u8"), ("codec", "<u2")]
)
"""What a tier knows of one payload without reading it: its bytes, and what its header says (see `BlockHeader`)."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a tier holds, oldest first.

    Attributes:
        keys: 34-byte addresses.
        records: `STORED` array in their order.
    """

    keys: list[bytes]
    records: NDArray[Any]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> dict[bytes, int]:
        """Bytes of each payload."""
        return dict(zip(self.keys, self.records["nbytes"].tolist(), strict=True))

    @classmethod
    def of(cls, keys: Sequence[bytes], payloads: Sequence[bytes | memoryview]) -> Inventory:
        """Of payloads in memory; what has no whole header is known by its length only."""
        return cls(list(keys), np.array([stored(payload, len(payload)) for payload in payloads], STORED))


def stored(payload: bytes | memoryview, nbytes: int) -> NDArray[Any]:
    """What a tier keeps of a payload that it is given, as one `STORED` record.

    Args:
        payload: begins with its header; without a whole one, everything but the size is zero.
        nbytes: of the payload.
    """
    record = np.zeros((), STORED)
    record["nbytes"] = nbytes
    try:
        header = BlockHeader.unpack(payload)
    except CorruptPayload:
        return record
    record["tokens"], record["codec"] = header.tokens, header.codec
    record["space"], record["expires"] = header.space, header.expires
    return record


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is and how it fares.

    Attributes:
        capacity: bytes that it may hold.
        used: bytes that it holds, with all overhead.
        blocks: blocks that it holds.
        fault: what failed last, while nothing has succeeded since; empty when the tier is well.
        counters: events by name since it was opened (`corrupt`, `read_error`, `write_error`, ...).
    """

    capacity: int
    used: int
    blocks: int
    fault: str = ""
    counters: dict[str, int] = field(default_factory=dict)


class Tier(Protocol):
    """A store of payloads under their 34-byte addresses.

    Payloads move between the tier and slots of the host's arena, which the tier was given when it was made. All calls
    are synchronous, batched and thread-safe. A tier knows no codecs. It never serves bytes that differ from what was
    written: what fails verification is removed, counted as `corrupt` and answered like an absent key. A failing device
    is answered by `False`, counted, and shown in `usage().fault`; calls raise only `TierUnavailable` (nobody there to
    ask) and `ClosedError`.
    """

    name: str

    def write(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        """Copy payloads out of the slots; True for each that is now stored (or was already).

        Nobody may change the slots until it returns. A batch may evict what it found stored: that is answered False,
        and reported by `dropped` like any other eviction.
        """
        ...

    def read(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        """Copy payloads into the slots; True for each that is whole and verified.

        Each slot has room for exactly the payload's size rounded up to 4096; a payload of another size is not read.
        What is in a slot that was answered False is undefined.
        """
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget these keys; unknown ones are ignored.

        A tier that outlives its process forgets them for good: at once, or when its device takes that again.
        """
        ...

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key is stored."""
        ...

    def inventory(self) -> Inventory:
        """Everything that is stored, oldest first."""
        ...

    def dropped(self) -> list[bytes]:
        """Keys that left of the tier's own accord since the last call, evicted or corrupt, and are not stored again."""
        ...

    def usage(self) -> TierUsage:
        """How full it is and how it fares."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent."""
        ...
