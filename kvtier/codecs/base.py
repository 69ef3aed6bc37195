"""What every codec can do."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.codecs.view import KVView
from kvtier.spec import KVSpec


class Codec(Protocol):
    """How the body of a block is encoded.

    A body holds the layers one after the other, each in one contiguous range of `layer_nbytes`, so that a layer can be
    loaded alone. Calls are batched over blocks and release the GIL; they allocate nothing that grows with the KV. A
    body is written and read in place, at `offsets` of `memory` (a slot's offset plus the header).

    Attributes:
        number: what block headers carry; never reused.
        plan: canonical text of the precision plan.
    """

    number: int
    plan: str

    def layer_nbytes(self, spec: KVSpec, position: int) -> int:
        """Exact bytes of one layer of the block at this position of its chain."""
        ...

    def nbytes(self, spec: KVSpec, position: int) -> int:
        """Exact bytes of the body of the block at this position of its chain."""
        ...

    def encode(
        self,
        spec: KVSpec,
        kv: KVView,
        tokens: NDArray[np.int64],
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
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
        spec: KVSpec,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
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
