"""Packed bytes to keys and arrays, and back: one bytes field, never a message a key."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvtier.block import ADDRESS_NBYTES
from kvtier.errors import ProtocolMismatch, UsageError

U32 = np.dtype("<u4")
_ADDRESS = struct.Struct(f"{ADDRESS_NBYTES}s")


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Join block addresses.

    Raises:
        UsageError: one of them does not have 34 bytes.
    """
    packed = b"".join(keys)
    if len(packed) != ADDRESS_NBYTES * len(keys) or any(len(key) != ADDRESS_NBYTES for key in keys):
        wrong = next((i for i, key in enumerate(keys) if len(key) != ADDRESS_NBYTES), 0)
        raise UsageError(f"block address {wrong} of {len(keys)} has {len(keys[wrong])} bytes, not {ADDRESS_NBYTES}")
    return packed


def unpack_keys(packed: bytes) -> list[bytes]:
    """Split into block addresses.

    Raises:
        ProtocolMismatch: the bytes are not whole addresses.
    """
    if len(packed) % ADDRESS_NBYTES:
        raise ProtocolMismatch(f"{len(packed)} bytes of keys are not whole {ADDRESS_NBYTES}-byte block addresses")
    return [key for (key,) in _ADDRESS.iter_unpack(packed)]


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Numbers as u32.

    Raises:
        UsageError: one of them does not fit.
    """
    wide = np.asarray(numbers, np.int64)
    if wide.size and not 0 <= wide.min() <= wide.max() < 1 << 32:
        raise UsageError(f"numbers from {wide.min()} to {wide.max()} do not fit 32 bits")
    return wide.astype(U32).tobytes()


def unpack_numbers(packed: bytes) -> list[int]:
    """Read u32 numbers.

    Raises:
        ProtocolMismatch: the bytes are not whole numbers.
    """
    numbers: list[int] = unpack_array(packed, U32).tolist()
    return numbers


def unpack_array(packed: bytes, dtype: DTypeLike) -> NDArray[Any]:
    """Read an array of packed records, without a copy and so read-only.

    Raises:
        ProtocolMismatch: the bytes are not whole records.
    """
    record = np.dtype(dtype)
    if len(packed) % record.itemsize:
        raise ProtocolMismatch(f"{len(packed)} bytes are not whole records of {record.itemsize} bytes")
    return np.frombuffer(packed, record)
