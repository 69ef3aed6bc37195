"""Checksums of what the tier itself writes."""

from __future__ import annotations

import xxhash


def digest(content: bytes | bytearray | memoryview) -> bytes:
    """XXH3, 64 bits, little-endian."""
    return xxhash.xxh3_64_intdigest(content).to_bytes(8, "little")


def seal(front: bytes) -> bytes:
    """Add its checksum."""
    return front + digest(front)


def is_sealed(page: bytes | memoryview, nbytes: int) -> bool:
    """Whether the checksum behind these first bytes is theirs."""
    return digest(page[:nbytes]) == page[nbytes : nbytes + 8]


def checksum(sealed: bytes | memoryview) -> int:
    """The checksum at the end of what is sealed."""
    return int.from_bytes(sealed[-8:], "little")
