"""What travels between the hierarchy and the tiers' processes: packed keys, slots and answers, never payloads.

keys      34-byte addresses, one after another
slots     int64 offsets, int64 lengths
answer    u32 how many keys the tier evicted | those keys | one byte for each key asked for
places    u64 epoch | int64 offset, u32 generation for each key
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from kvtier.block import ADDRESS_NBYTES
from kvtier.tiers.base import STORED, Inventory, Slots
from kvtier.tiers.shared import PLACE, Places

_COUNT = struct.Struct("<I")
_EPOCH = struct.Struct("<Q")


def join(keys: Sequence[bytes]) -> bytes:
    """Pack keys."""
    return b"".join(keys)


def split(packed: bytes) -> list[bytes]:
    """Unpack keys."""
    return [packed[i : i + ADDRESS_NBYTES] for i in range(0, len(packed), ADDRESS_NBYTES)]


def pack_slots(slots: Slots) -> bytes:
    """Pack slots."""
    return slots.offsets.astype("<i8").tobytes() + slots.nbytes.astype("<i8").tobytes()


def unpack_slots(packed: bytes) -> Slots:
    """Unpack slots."""
    both = np.frombuffer(packed, "<i8").astype(np.int64)
    return Slots(both[: len(both) // 2], both[len(both) // 2 :])


def pack_answer(flags: Sequence[bool], dropped: Sequence[bytes]) -> bytes:
    """Pack an answer to read or write."""
    return _COUNT.pack(len(dropped)) + join(dropped) + bytes(flags)


def unpack_answer(packed: bytes) -> tuple[list[bool], list[bytes]]:
    """Unpack an answer: for each key, and what the tier evicted."""
    end = _COUNT.size + _COUNT.unpack_from(packed)[0] * ADDRESS_NBYTES
    return [flag != 0 for flag in packed[end:]], split(packed[_COUNT.size : end])


def pack_places(places: Places) -> bytes:
    """Pack where payloads are."""
    return _EPOCH.pack(places.epoch) + places.slots.tobytes()


def unpack_places(packed: bytes) -> Places:
    """Unpack where payloads are."""
    return Places(_EPOCH.unpack_from(packed)[0], np.frombuffer(packed, PLACE, offset=_EPOCH.size))


def pack_inventory(inventory: Inventory) -> bytes:
    """Pack an inventory: all keys, then all records."""
    return join(inventory.keys) + inventory.records.tobytes()


def unpack_inventory(packed: bytes) -> Inventory:
    """Unpack an inventory."""
    end = len(packed) // (ADDRESS_NBYTES + STORED.itemsize) * ADDRESS_NBYTES
    return Inventory(split(packed[:end]), np.frombuffer(packed, STORED, offset=end))
