"""How a client reaches a host, and where it reads and writes slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from kvtier.client.presence import Presence
from kvtier.rpc.kvtier_pb2 import Welcome

Metadata = tuple[tuple[str, str], ...]


class Memory(Protocol):
    """Where slots are, as one client sees them: the arena itself, or memory with the same offsets. Thread-safe."""

    @property
    def readable(self) -> NDArray[np.uint8]:
        """Slots that are leased, read-only, at their offsets in the arena."""
        ...

    @property
    def generations(self) -> NDArray[np.uint32]:
        """Generation of the slot at each page, read-only, live."""
        ...

    def writable(self) -> NDArray[np.uint8]:
        """For writing into reserved slots only, at their offsets in the arena."""
        ...

    def is_of(self, welcome: Welcome) -> bool:
        """Whether a new attachment to this host can go on with it."""
        ...

    def begin(self, session: int) -> None:
        """A session with this number has begun."""
        ...

    def leased(self, lease: int, keys: Sequence[bytes], slots: NDArray[Any]) -> None:
        """These slots (a `SLOT` array) are leased; they hold the first of the keys."""
        ...

    def fetch(self, lease: int, first: int, end: int) -> int:
        """See `Session.fetch`."""
        ...

    def released(self, lease: int) -> None:
        """A lease is about to be given back."""
        ...

    def reserved(self, ticket: int, nbytes: Sequence[int], grants: NDArray[Any]) -> None:
        """Slots were granted (a `GRANT` array)."""
        ...

    def send(self, ticket: int, written: Sequence[int]) -> Sequence[int]:
        """Bring what was written at these positions of a reservation to the host; where it has arrived whole.

        Raises:
            SessionError: it cannot be brought there.
        """
        ...

    def ended(self, ticket: int) -> None:
        """Nobody writes into this reservation any more."""
        ...

    def close(self) -> None:
        """Stop what is under way; idempotent."""
        ...


class Way(Protocol):
    """To one host."""

    @property
    def where(self) -> str:
        """The host's door, for people."""
        ...

    @property
    def metadata(self) -> Metadata:
        """What every call carries."""
        ...

    def open(self) -> grpc.Channel:
        """A channel to the door; it connects with the first call."""
        ...

    def memory(self, welcome: Welcome) -> Memory:
        """The memory behind the door.

        Raises:
            SessionUnavailable: there is none.
        """
        ...

    def presence(self, welcome: Welcome) -> Presence | None:
        """What proves that this process may still write into the arena; None where it does not write there itself."""
        ...
