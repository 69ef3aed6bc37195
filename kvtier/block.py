"""The header in front of every stored block.

A payload is header and body in one byte range. The header alone says what the body is, so that any tier, host or later
version can check a payload without asking anybody. All integers are little-endian.

      0   8  magic "KVTIERBK"
      8   2  format version
     10   2  header bytes, a multiple of 64
     12   2  codec number
     14   2  tensor-parallel rank
     16   4  tokens in the block
     20   4  position of the block in its chain, from 0
     24   8  body bytes
     32   8  checksum of the body (XXH3, 64 bits)
     40  32  key
     72  32  spec digest
    104   2  length of the plan text
    106   6  zero
    112  16  the first half of the keyspace's root: which family of keys it belongs to
    128   8  seconds since the epoch after which nobody may be given it; 0 for never
    136   n  canonical plan text, UTF-8, then zeros
     -8   8  checksum of the header up to here (XXH3, 64 bits)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from kvtier.errors import ConfigError, CorruptPayload, UsageError

MAGIC = b"KVTIERBK"
VERSION = 2
FIXED = struct.Struct("<8sHHHHIIQQ32s32sH6x16sQ")
FIELDS = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u2"),
        ("size", "<u2"),
        ("codec", "<u2"),
        ("rank", "<u2"),
        ("tokens", "<u4"),
        ("position", "<u4"),
        ("body", "<u8"),
        ("checksum", "<u8"),
        ("key", "V32"),
        ("spec", "V32"),
        ("plan", "<u2"),
        ("zero", "V6"),
        ("space", "V16"),
        ("expires", "<u8"),
    ]
)
"""The fixed part again, for many headers at a time."""
ALIGN = 64
PAGE = 4096
"""Slots are multiples of this, so that direct I/O reads and writes them in place."""

KEY_NBYTES = 32
SPACE_NBYTES = 16
ADDRESS_NBYTES = 34
"""A block's address: its key and the tensor-parallel rank as u16."""


def header_nbytes(plan: str) -> int:
    """Bytes of the header of a block with this canonical plan text."""
    return -(-(FIXED.size + len(plan.encode()) + 8) // ALIGN) * ALIGN


def slot_nbytes(payload_nbytes: int) -> int:
    """Size of the slot that holds a payload: the size class."""
    return -(-payload_nbytes // PAGE) * PAGE


def address(key: bytes, rank: int = 0) -> bytes:
    """A block's address on a host and in the index."""
    return key + rank.to_bytes(2, "little")


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a payload says of itself.

    Attributes:
        key: 32-byte chain key.
        rank: tensor-parallel rank.
        position: place of the block in its chain, from 0.
        tokens: tokens in the block.
        codec: number of the codec of the body.
        plan: canonical plan text.
        spec_digest: `KVSpec.digest`.
        body_nbytes: bytes after the header.
        checksum: XXH3-64 of the body.
        space: first half of the keyspace's root.
        expires: seconds since the epoch after which nobody may be given it; 0 for never.
    """

    key: bytes
    rank: int
    position: int
    tokens: int
    codec: int
    plan: str
    spec_digest: bytes
    body_nbytes: int
    checksum: int
    space: bytes = bytes(SPACE_NBYTES)
    expires: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of this header."""
        return header_nbytes(self.plan)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of header and body."""
        return self.nbytes + self.body_nbytes

    @property
    def address(self) -> bytes:
        """The block's address, 34 bytes."""
        return address(self.key, self.rank)

    def pack(self) -> bytes:
        """Encode; the result has `nbytes` bytes.

        Raises:
            UsageError: a field that does not fit its place.
            ConfigError: the plan text is too long.
        """
        if len(self.key) != KEY_NBYTES or len(self.spec_digest) != KEY_NBYTES:
            raise UsageError(f"key and spec digest have {len(self.key)} and {len(self.spec_digest)} bytes, not 32")
        if len(self.space) != SPACE_NBYTES:
            raise UsageError(f"space has {len(self.space)} bytes, not {SPACE_NBYTES}")
        plan = self.plan.encode()
        size = self.nbytes
        if size > PAGE:
            raise ConfigError(
                f"the plan text has {len(plan)} bytes; at most {PAGE - FIXED.size - 8} fit a block header"
            )
        numbers = (self.codec, self.rank, self.tokens, self.position, self.body_nbytes, self.checksum)
        try:
            family = self.space, self.expires
            fixed = FIXED.pack(MAGIC, VERSION, size, *numbers, self.key, self.spec_digest, len(plan), *family)
        except struct.error as exc:
            raise UsageError(f"a field of a block header is out of range: {exc}; {self}") from exc
        front = (fixed + plan).ljust(size - 8, b"\0")
        return front + xxhash.xxh3_64_intdigest(front).to_bytes(8, "little")

    @classmethod
    def unpack(cls, payload: bytes | bytearray | memoryview) -> BlockHeader:
        """Decode and verify the header at the start of `payload`.

        Raises:
            CorruptPayload: whatever is wrong with it, foreign versions included.
        """
        view = memoryview(payload)
        if len(view) < FIXED.size + 8:
            raise CorruptPayload(f"a payload of {len(view)} bytes is too short for a block header")
        magic, version, size, codec, rank, tokens, position, body, checksum, key, spec, n, *family = FIXED.unpack_from(
            view
        )
        if magic != MAGIC:
            raise CorruptPayload("no block header here")
        if version != VERSION:
            raise CorruptPayload(f"block format version {version}; this kvtier reads version {VERSION}")
        if size % ALIGN or not FIXED.size + n + 8 <= size <= min(len(view), PAGE):
            raise CorruptPayload(f"a block header says that it has {size} bytes, {n} of them plan text")
        if xxhash.xxh3_64_intdigest(view[: size - 8]) != int.from_bytes(view[size - 8 : size], "little"):
            raise CorruptPayload("the checksum of a block header is wrong")
        try:
            plan = bytes(view[FIXED.size : FIXED.size + n]).decode()
        except UnicodeDecodeError as exc:
            raise CorruptPayload("the plan text of a block header is not UTF-8") from exc
        header = cls(key, rank, position, tokens, codec, plan, spec, body, checksum, *family)
        if header.nbytes != size:
            raise CorruptPayload(f"a block header of {size} bytes should have {header.nbytes}")
        return header


def verify_payload(payload: bytes | bytearray | memoryview, *, expected: bytes | None = None) -> BlockHeader:
    """Verify header and body of a whole payload (what follows it in its slot is ignored).

    Args:
        payload: the bytes, at least as long as the header says.
        expected: the address that the payload must carry.

    Raises:
        CorruptPayload: anything is not as it was written.
    """
    view = memoryview(payload)
    header = BlockHeader.unpack(view)
    if expected is not None and header.address != expected:
        raise CorruptPayload(f"the payload of block {expected.hex()} carries the address {header.address.hex()}")
    if len(view) < header.payload_nbytes:
        raise CorruptPayload(f"a payload of {header.payload_nbytes} bytes was cut to {len(view)}")
    if xxhash.xxh3_64_intdigest(view[header.nbytes : header.payload_nbytes]) != header.checksum:
        raise CorruptPayload(f"the checksum of block {header.address.hex()} is wrong")
    return header
