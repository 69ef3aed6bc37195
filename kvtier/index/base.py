"""What every index can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Replica:
    """Where one copy of a block is.

    Attributes:
        node: number of the host in the node table.
        incarnation: which life of that host wrote this; a restarted host's old entries are dead.
        tier: `kvtier.tiers.base.TierNumber` (1 gpu, 2 cpu, 3 nvme).
        nbytes: bytes of the payload.
    """

    node: int
    incarnation: int
    tier: int
    nbytes: int


class Index(Protocol):
    """Which host of the fleet holds which block.

    Soft state: each host's own table is the truth about that host. Keys are 34-byte block addresses. One index object
    speaks for one host (`node`, `incarnation`); thread-safe. Nothing here raises for a slow or absent server: lookups
    answer "nowhere", updates are kept in a bounded set that collapses to "publish the inventory again"
    (`needs_publish`).
    """

    node: int
    incarnation: int

    def match(self, keys: Sequence[bytes]) -> list[tuple[Replica, ...]]:
        """Live replicas of each key, this host's own included, in one round trip."""
        ...

    def add(self, keys: Sequence[bytes], tier: int, nbytes: Sequence[int]) -> None:
        """This host now holds these blocks (best in this tier); told in the background, batched."""
        ...

    def discard(self, keys: Sequence[bytes]) -> None:
        """This host no longer holds these blocks in any tier; told in the background, batched."""
        ...

    def publish(self, inventory: Iterable[tuple[bytes, int, int]]) -> None:
        """Add everything this host holds, as (key, tier, nbytes); clears `needs_publish`."""
        ...

    def forget(self, node: int) -> None:
        """Drop a node from the node table: its entries are dead from now on."""
        ...

    def needs_publish(self) -> bool:
        """Whether updates were lost, so that `publish` is due."""
        ...

    def flush(self, timeout: float) -> bool:
        """Wait until what was added and discarded is told; False when it was not in time."""
        ...

    def status(self) -> dict[str, object]:
        """Health for people and metrics: kind, ok, reason, round trips, queued updates, updates told, errors."""
        ...

    def close(self) -> None:
        """Stop telling; idempotent."""
        ...
