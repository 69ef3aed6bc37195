"""Proof that a slot holds the block that was asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.block import FIXED, KEY_NBYTES, SPACE_NBYTES, BlockHeader, header_nbytes
from kvtier.codecs.base import Codec
from kvtier.keys import Keyspace

_WORDS = 17
"""64-bit words of a header's fixed part."""
_POSITION, _BODY, _CHECKSUM, _KEY, _EXPIRES = 2, 3, 4, slice(5, 9), 16
"""Words that differ from block to block: position (upper half), body bytes, checksum, key, when it expires."""


class Headers:
    """Makes and checks the headers of one keyspace, many at a time.

    Args:
        keyspace: which.
        codec: carries out its plan.
        rank: tensor-parallel rank.
        chained: whether a block's place in its chain is known to all who ask for it; else every header says 0.
    """

    def __init__(self, keyspace: Keyspace, codec: Codec, rank: int, *, chained: bool = True) -> None:
        self._keyspace, self._codec, self._rank, self._step = keyspace, codec, rank, int(chained)
        self.nbytes = header_nbytes(codec.plan)
        template = self.make(bytes(KEY_NBYTES), 0, 0)
        self._fixed = np.frombuffer(template[: FIXED.size], np.uint64)
        self._plan = np.frombuffer(template[FIXED.size : -8], np.uint64)

    def body_nbytes(self, position: int) -> int:
        """Body bytes of the block at this position."""
        return self._codec.nbytes(position)

    def payload_nbytes(self, position: int) -> int:
        """Header and body bytes of the block at this position."""
        return self.nbytes + self.body_nbytes(position)

    def make(self, key: bytes, position: int, checksum: int, expires: int = 0) -> bytes:
        """The header of one block."""
        return BlockHeader(
            key,
            self._rank,
            position * self._step,
            self._keyspace.spec.block_tokens,
            self._codec.number,
            self._codec.plan,
            self._keyspace.spec.digest,
            self.body_nbytes(position),
            checksum,
            self._keyspace.root[:SPACE_NBYTES],
            expires,
        ).pack()

    def matching(
        self, memory: NDArray[np.uint8], offsets: NDArray[np.int64], addresses: Sequence[bytes], first: int = 0
    ) -> int:
        """How many of the first slots hold the block of that address, from block `first` of a chain on.

        Everything but the checksums and when they expire is compared: all of it is known before.
        """
        count = len(offsets)
        words = memory.view(np.uint64)[(offsets // 8)[:, None] + np.arange(self.nbytes // 8)]
        expected = np.tile(self._fixed, (count, 1))
        positions = np.arange(first, first + count, dtype=np.uint64)
        expected[:, _POSITION] |= positions * np.uint64(self._step) << np.uint64(32)
        expected[positions > 0, _BODY] = self.body_nbytes(1)
        packed = np.frombuffer(b"".join(addresses[:count]), np.uint8).reshape(count, -1)
        expected[:, _KEY] = np.ascontiguousarray(packed[:, :KEY_NBYTES]).view(np.uint64)
        for unknown in (_CHECKSUM, _EXPIRES):
            words[:, unknown] = expected[:, unknown]
        same = (words[:, :_WORDS] == expected).all(axis=1) & (words[:, _WORDS:-1] == self._plan).all(axis=1)
        return count if same.all() else int(np.argmin(same))
