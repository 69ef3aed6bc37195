"""What every codec can do."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.codecs.view import KVView
from kvtier.spec import KVSpec


class Codec(Protocol):
    """How the bodies of one keyspace's blocks are encoded.

    A body holds the layers one after the other, each in one contiguous range, so that a layer can be loaded alone.
    Calls are batched over blocks and release the GIL; they allocate nothing that grows with the KV. A body is written
    and read in place, at `offsets` of `memory` (a slot's offset plus the header). A block's position is its place in
    its chain, from 0: the first block of a sequence may be stored otherwise than the rest, which are all alike.

    Attributes:
        number: what block headers carry; never reused.
        plan: canonical text of the precision plan.
        spec: of the blocks.
    """

    number: int
    plan: str
    spec: KVSpec

    def layers(self, position: int) -> NDArray[np.int64]:
        """Where each layer begins in the body of the block at this position, and where the last one ends; exact."""
        ...

    def nbytes(self, position: int) -> int:
        """Exact bytes of the body of the block at this position."""
        ...

    def encode(
        self,
        kv: KVView,
        tokens: NDArray[np.int64],
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        positions: NDArray[np.int64],
        layers: range,
    ) -> NDArray[np.bool_]:
        """Encode blocks; block i begins at token `tokens[i]` of `kv`, its body at `offsets[i]` of `memory`.

        Returns:
            For each block, whether it can be stored: False when the plan cannot represent it (NaN, Inf, a scale out of
            range); its body is then undefined.
        """
        ...

    def decode(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        positions: NDArray[np.int64],
        kv: KVView,
        tokens: NDArray[np.int64],
        layers: range,
    ) -> None:
        """Decode blocks into `kv`, the inverse of `encode`.

        `memory` may be read-only. Its bytes are not trusted: whatever they are, nothing outside the blocks' ranges of
        `kv` is written and nothing raises.

        Raises (both ways, before anything is written):
            KVMismatch: the view is of another spec, or (decode) read-only.
            UsageError: a block outside `memory` or outside the view; layers that the spec has not; (encode) read-only
                `memory`.
        """
        ...
