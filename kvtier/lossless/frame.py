"""Payloads to frames and back. All integers are little-endian.

      0   8  magic "KVTIERLL"
      8   2  format version
     10   2  method
     12   4  zero
     16   8  bytes of the payload, even
     24   8  bytes after this header
     32      pieces

    piece:  4  bytes of its packed high plane
            n  low plane
               packed high plane; where it would not shrink, its n bytes as they are

A payload of 2n bytes is cut into ceil(n / PIECE) pieces of equally many elements, the last may have fewer: so whatever
the payload's size, a call works in a few times PIECE bytes of memory of its own.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kvtier.block import BlockHeader
from kvtier.errors import CorruptPayload
from kvtier.lossless.method import Method
from kvtier.lossless.planes import merge, split

MAGIC = b"KVTIERLL"
VERSION = 1
HEADER = struct.Struct("<8sHHIQQ")
LENGTH = struct.Struct("<I")
PIECE = 512 << 10
"""Elements at a time; zstd's level 1 finds and decodes exponents best in planes above 256 KiB."""

WHOLE = ("raw", "bf16", "fp16")
"""Plans that keep whole elements; of 16 bits, unless "raw" keeps wider ones, which a header does not tell."""

Buffer = bytes | bytearray | memoryview


_CODECS = {Method.LZ4: pa.Codec("lz4_raw"), Method.ZSTD: pa.Codec("zstd", compression_level=1)}
"""Used by several threads at a time: each of their calls has a context of its own."""


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.high = np.empty(PIECE, np.uint8)


_scratch = _Scratch()


def suits(header: BlockHeader) -> bool:
    """Whether packing the payload of this header is worth a try."""
    return header.plan in WHOLE


def is_frame(content: Buffer) -> bool:
    """Whether these bytes are a frame, and not a payload as it is."""
    return content[: len(MAGIC)] == MAGIC


def pack(payload: Buffer, method: Method, into: memoryview) -> int | None:
    """Write the frame of a payload.

    Returns:
        Bytes of the frame; None when it does not fit `into` or is not smaller than the payload. What is in `into` is
        undefined then. Data that does not shrink is given up after its first piece.
    """
    raw, out = _array(payload), np.frombuffer(into, np.uint8)
    room = min(out.size, raw.size - 1)
    if method is Method.STORED or raw.size % 2 or HEADER.size >= room:
        return None
    codec, at = _CODECS[method], HEADER.size
    for first, count in _pieces(raw.size // 2):
        high, low = _scratch.high[:count], at + LENGTH.size
        if low + count > room:
            return None
        split(raw[2 * first : 2 * (first + count)], high, out[low : low + count])
        packed = np.frombuffer(codec.compress(high, asbytes=False), np.uint8)
        if packed.size >= count:
            packed = high
        LENGTH.pack_into(into, at, packed.size)
        at = low + count + packed.size
        if at > room or at >= 2 * (first + count):
            return None
        out[low + count : at] = packed
    HEADER.pack_into(into, 0, MAGIC, VERSION, method, 0, raw.size, at - HEADER.size)
    return at


def unpack(frame: Buffer, into: memoryview) -> int:
    """Write the payload of a frame; what follows the frame is ignored.

    The payload is not verified, and a frame that was altered may give any bytes: call `verify_payload`.

    Returns:
        Bytes of the payload; nothing behind them is written.

    Raises:
        CorruptPayload: this is no frame, it was cut, its pieces do not decode, or its payload is larger than `into`;
            `into` is undefined then.
    """
    method, nbytes, end = _header(frame, len(into))
    source, out = _array(frame), np.frombuffer(into, np.uint8)
    at = HEADER.size
    for first, count in _pieces(nbytes // 2):
        low = at + LENGTH.size
        if low + count > end:
            raise CorruptPayload(f"a frame of {end} bytes ends within the piece at {at}")
        (size,) = LENGTH.unpack_from(frame, at)
        at = low + count + size
        if at > end or size > count:
            raise CorruptPayload(f"a piece of {count} elements says that it has {size} packed bytes of {end} in all")
        high = source[low + count : at]
        if size < count:
            high = _decompressed(method, high, count)
        merge(high, source[low : low + count], out[2 * first : 2 * (first + count)])
    if at != end:
        raise CorruptPayload(f"a frame of {end} bytes has pieces of {at}")
    return nbytes


def _array(content: Any) -> NDArray[np.uint8]:
    """The bytes of a buffer, read-only, as the kernels are compiled for."""
    array = np.frombuffer(content, np.uint8)
    array.flags.writeable = False
    return array


def _header(frame: Buffer, room: int) -> tuple[Method, int, int]:
    """Method, bytes of the payload and end of the frame."""
    if len(frame) < HEADER.size:
        raise CorruptPayload(f"{len(frame)} bytes are too short for a frame")
    magic, version, method, _, nbytes, packed = HEADER.unpack_from(frame)
    if magic != MAGIC or version != VERSION:
        raise CorruptPayload(f"no frame here, or not of version {VERSION}")
    if method not in _CODECS:
        raise CorruptPayload(f"a frame was packed with method {method}; this kvtier knows {[*map(int, _CODECS)]}")
    if nbytes % 2 or not 0 < nbytes <= room or packed > len(frame) - HEADER.size:
        raise CorruptPayload(
            f"a frame says that it has {packed} bytes of {len(frame)}, and a payload of {nbytes} for {room}"
        )
    return Method(method), nbytes, HEADER.size + packed


def _decompressed(method: Method, packed: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    try:
        plane = _CODECS[method].decompress(packed, count, asbytes=False)
    except (OSError, pa.ArrowException) as exc:
        raise CorruptPayload(f"a piece of a frame does not decode: {exc}") from exc
    return _array(plane)


def _pieces(elements: int) -> Iterator[tuple[int, int]]:
    """First element and number of elements of each piece."""
    size = -(-elements // -(-elements // PIECE))
    for first in range(0, elements, size):
        yield first, min(size, elements - first)
