"""What is packed is unpacked."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.block import ADDRESS_NBYTES
from kvtier.tiers.base import STORED, Inventory, Slots
from kvtier_services.actors import wire

KEYS = st.lists(st.binary(min_size=ADDRESS_NBYTES, max_size=ADDRESS_NBYTES), max_size=8)
NUMBERS = st.integers(0, 2**62)


@given(KEYS, st.lists(st.booleans(), max_size=8))
def test_answers(dropped, flags):
    assert wire.unpack_answer(wire.pack_answer(flags, dropped)) == (flags, dropped)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=8))
def test_slots(pairs):
    slots = Slots.of([offset for offset, _ in pairs], [nbytes for _, nbytes in pairs])
    back = wire.unpack_slots(wire.pack_slots(slots))
    assert list(zip(back.offsets.tolist(), back.nbytes.tolist(), strict=True)) == pairs


@given(KEYS, st.data())
def test_inventories(keys, data):
    size = len(keys) * STORED.itemsize
    records = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), STORED)
    back = wire.unpack_inventory(wire.pack_inventory(Inventory(keys, records)))
    assert (back.keys, back.records.tobytes()) == (keys, records.tobytes())
    assert wire.split(wire.join(keys)) == keys


def test_a_batch_of_blocks_is_a_few_bytes_a_block():
    keys, slots = [b"k" * ADDRESS_NBYTES] * 64, Slots.of(range(64), [1 << 21] * 64)
    assert len(wire.join(keys)) + len(wire.pack_slots(slots)) <= 64 * 64
