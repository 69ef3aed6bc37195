"""What a connector's client needs from a host, whatever lies between them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.hierarchy.answers import Matched, Placement, Reserved
from kvtier.memory.device import DeviceMemory
from kvtier.tiers.base import TierNumber


class Session(Protocol):
    """One client's connection to a host. Thread-safe. Keys are 34-byte block addresses, in chain order.

    Every call may raise `SessionUnavailable` or `DeadlineExceeded`; the client counts that as a miss or a refusal.
    """

    @property
    def epoch(self) -> int:
        """Changes when the session attached anew; what was leased or reserved before is void."""
        ...

    @property
    def salt(self) -> str:
        """What stands before `tenant` in every keyspace of this session; empty where nobody is kept from anybody."""
        ...

    def claim(self, keyspace: bytes) -> None:
        """Say that a keyspace (its canonical encoding) is used; a host that keeps tenants apart asks for that."""
        ...

    def readable(self) -> NDArray[np.uint8]:
        """The arena, read-only."""
        ...

    def writable(self) -> NDArray[np.uint8]:
        """The arena, for writing into reserved slots only."""
        ...

    def generations(self) -> NDArray[np.uint32]:
        """Generation of the slot at each 4 KiB page of the arena (`offset // 4096`), read-only, live."""
        ...

    def attach(self, device: str) -> DeviceMemory | str:
        """Open the memory of the GPU tier, for KV that lies on `device`; or why it cannot be, which the host is told.

        Why is empty when there is nothing to open: see `kvtier.memory.device.attach`.

        Args:
            device: "cpu" or "cuda:N".
        """
        ...

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
        """Lease the longest prefix of `keys` that is in the arena, staging what lies in other tiers.

        Who has attached the GPU tier's memory gets the slots there of the blocks that it has, and not those of the
        arena.

        A stream takes blocks as they come: its first call does not wait, each later one waits until more than `after`
        blocks are there; together they are counted as one call.

        Args:
            keys: addresses of a chain from its first block.
            wait: seconds to wait for blocks that must be staged first.
            prefill: tokens a second that the engine computes: what would take longer to load is declined. 0 when that
                is not known.
            stream: whether this call is one of several for the same keys.
            after: blocks that an earlier call of the stream gave.
            device: epoch of the GPU tier's memory that the caller has attached; 0 for none.
            again: whether another process of the same engine asked before for the same: this call leases and stages
                like any other, and is in no counter.
        """
        ...

    def fetch(self, lease: int, first: int, end: int) -> int:
        """Bring leased slots to where `readable` shows them; how many are there, from slot `first` of the lease on.

        Waits until one is, if only that is to be had; all of them at once where the arena is mapped. 0: none will come.

        Args:
            lease: its number.
            first: slot to begin with.
            end: slot to end before.
        """
        ...

    def release(self, lease: int, seconds: float = 0.0, part: float = 1.0) -> None:
        """Give a lease back; returns at once, never raises, idempotent.

        Args:
            lease: its number.
            seconds: how long the load took, for the host's histogram; 0 when nothing was loaded.
            part: how much of the leased bytes was read in that time; above 1 when some were read again.
        """
        ...

    def reserve(self, keys: Sequence[bytes], nbytes: Sequence[int], start: int) -> Reserved:
        """Reserve slots for the payloads of `keys[start:]`; `keys[:start]` are their ancestors, which are touched.

        Args:
            keys: addresses of a chain from its first block.
            nbytes: payload bytes of each key of `keys[start:]`.
            start: how many of the keys are ancestors.
        """
        ...

    def writing(self) -> AbstractContextManager[None]:
        """Say that slots may be written into while the context lasts, from `reserve` to `commit`.

        A session that was cut off meanwhile keeps those slots quarantined until the context is left.
        """
        ...

    def commit(self, ticket: int, written: Sequence[int], seconds: float = 0.0, raw: int = 0) -> list[bool]:
        """Make reserved blocks visible; what is not written is given back.

        Args:
            ticket: of `reserve`.
            written: positions (in the reservation's grants) whose slot holds a whole payload, header included.
            seconds: how long the save took, for the host's histogram.
            raw: bytes of the KV of each of these blocks as its model has it, for what the host says of codecs; 0 when
                that is not said.

        Returns:
            For each of `written`, whether it is now visible.
        """
        ...

    def condemn(self, keys: Sequence[bytes], why: str) -> None:
        """Report blocks whose bytes in the arena are not what was written: the host drops them; never raises."""
        ...

    def move(self, keys: Sequence[bytes], tier: TierNumber, wait: float) -> int:
        """Bring a chain's blocks to one tier and out of the other memory tiers; how many are there at the end."""
        ...

    def prefetch(self, keys: Sequence[bytes], tier: TierNumber) -> Future[int]:
        """Bring a chain's blocks up to `tier` in the background, leaving copies; how many are there at the end."""
        ...

    def pin(self, keys: Sequence[bytes], seconds: float) -> int:
        """Bring a chain's blocks to the CPU tier and keep them there for some time, whoever ends; how many are kept."""
        ...

    def unpin(self, keys: Sequence[bytes]) -> int:
        """Let blocks go that were pinned; how many were."""
        ...

    def evict(self, keys: Sequence[bytes]) -> int:
        """Drop blocks from every tier, pinned ones too, for good; how many there were. Leased bytes stay readable."""
        ...

    def clear(self, space: bytes) -> int:
        """Drop all blocks of one keyspace, named by the first half of its root; how many there were."""
        ...

    def inspect(self, keys: Sequence[bytes]) -> list[dict[str, Any] | None]:
        """For each key what the host knows of it, or None: tiers, nbytes, codec, created, last_access, hits."""
        ...

    def where(self, keys: Sequence[bytes]) -> Placement:
        """Which hosts hold how much of a chain, the longest prefix first. Nothing is leased, moved or counted."""
        ...

    def status(self) -> dict[str, Any]:
        """The host's status; see `kvtier.hierarchy.stats`."""
        ...

    def close(self) -> None:
        """End the session: leases are released, reservations given back; idempotent."""
        ...
