"""What every index can do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_REPLICAS = 8
"""Replicas listed of one block; the newest are kept. A prompt that every host holds need not list every host."""


@dataclass(frozen=True, slots=True)
class Replica:
    """Where one copy of a block is.

    Attributes:
        node: number of the host in the node table, 1 to 65,535.
        incarnation: which life of that host wrote this (u32); a restarted host's old entries are dead.
        tier: `kvtier.tiers.base.TierNumber` (1 gpu, 2 cpu, 3 nvme).
        nbytes: bytes of the payload (u32).
    """

    node: int
    incarnation: int
    tier: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """One host of the fleet, as the node table has it.

    Attributes:
        node: its number.
        incarnation: its current life.
        host: its name; the same name always gets the same number.
        door: where other hosts reach it; empty when they cannot.
        age: seconds since its last heartbeat, by the server's clock.
        alive: whether it was heard of lately.
    """

    node: int
    incarnation: int
    host: str
    door: str
    age: float
    alive: bool


@dataclass(frozen=True, slots=True)
class Life:
    """One life of one host: whom an index speaks for.

    Attributes:
        node: number of the host, 1 to 65,535.
        incarnation: which life this is (u32); later ones are greater.
        host: its name.
        door: where other hosts reach it; empty when they cannot.
        provisional: the numbers were chosen without the server; when it refuses them, the host registers.
    """

    node: int
    incarnation: int
    host: str
    door: str = ""
    provisional: bool = False


@dataclass(frozen=True, slots=True)
class Swept:
    """A part of a round through the index.

    Attributes:
        keys: blocks looked at.
        dead: those of which only dead lives tell.
        partly: those of which dead lives tell besides others.
        changed: of these two, deleted or trimmed.
        mine: entries of this host's own life, as (key, tier, nbytes).
    """

    keys: int
    dead: int
    partly: int
    changed: int
    mine: tuple[tuple[bytes, int, int], ...]


class Index(Protocol):
    """Which host of the fleet holds which block.

    Soft state: each host's own table is the truth about that host. Keys are 34-byte block addresses. One index object
    speaks for one host (`node`, `incarnation`); thread-safe. Nothing but `sweep` raises for a slow or absent server:
    lookups answer None, updates are kept in a bounded set that collapses to "publish the inventory again"
    (`needs_publish`). An index whose host has registered again tells nothing more.
    """

    @property
    def node(self) -> int:
        """Number of the host that this index speaks for."""
        ...

    @property
    def incarnation(self) -> int:
        """Its life."""
        ...

    def match(self, keys: Sequence[bytes]) -> list[tuple[Replica, ...]] | None:
        """Live replicas of each key, this host's own included, at most `MAX_REPLICAS`, in one round trip.

        None when there was no answer in time, or nobody was asked because there was none lately.
        """
        ...

    def lacking(self, held: Sequence[tuple[bytes, int, int]]) -> list[bytes] | None:
        """Which of these blocks of this host, as (key, tier, nbytes), are not in the index, or as something else.

        What is still to be told does not count, nor what `MAX_REPLICAS` other hosts have. None when there is no answer.
        """
        ...

    def claims(self) -> list[tuple[bytes, int, int]]:
        """Entries of this host's life that rounds through the index met since this was last asked; bounded."""
        ...

    def sweep(self, *, trim: bool) -> Iterator[Swept]:
        """Go through the whole index in the caller's thread, and delete what the dead told if `trim`.

        Raises:
            SessionUnavailable: there is no answer.
        """
        ...

    def others(self) -> bool:
        """Whether the fleet has another live host; without one a lookup can find nothing new. No round trip."""
        ...

    def nodes(self) -> list[Node]:
        """The node table as last seen, this host included; no round trip."""
        ...

    def add(self, keys: Sequence[bytes], tier: int, nbytes: Sequence[int]) -> None:
        """This host now holds these blocks (best in this tier); told in the background, batched."""
        ...

    def discard(self, keys: Sequence[bytes]) -> None:
        """This host no longer holds these blocks in any tier; told in the background, batched."""
        ...

    def publish(self, inventory: Iterable[tuple[bytes, int, int]]) -> None:
        """Tell everything this host holds, as (key, tier, nbytes), in the caller's thread.

        Clears `needs_publish`, unless the server went away before the end. A key that is added or discarded
        meanwhile is left to that, so an inventory read lazily from a living table is safe. Not for a thread that must
        not wait.
        """
        ...

    def forget(self, node: int) -> None:
        """Drop a node from the node table: its entries are dead until it is heard of again.

        This host's own is dead once the index is closed.
        """
        ...

    def needs_publish(self) -> bool:
        """Whether `publish` is due: updates were lost, or nothing was told in this life yet."""
        ...

    def flush(self, timeout: float) -> bool:
        """Wait until what was added and discarded is told; False when it was not in time."""
        ...

    def status(self) -> dict[str, object]:
        """Health for people and metrics: kind, ok, reason, round trips, queued updates, updates told, errors."""
        ...

    def close(self) -> None:
        """Stop telling; idempotent. What is still queued is lost: `flush` first."""
        ...
