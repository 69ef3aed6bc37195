from __future__ import annotations

import numpy as np
import pytest

from kvtier.block import PAGE
from kvtier.errors import ConfigError, UsageError
from kvtier.memory.pool import SEGMENTS_AT_LEAST, SlotPool


def test_slots_of_one_class_lie_side_by_side():
    pool = SlotPool(1 << 20)
    first = [pool.allocate(5000) for _ in range(3)]
    assert first == [0, 2 * PAGE, 4 * PAGE]


def test_a_class_takes_a_part_of_the_memory_at_once_and_gives_it_back_whole():
    pool = SlotPool(16 << 20)
    small = pool.allocate(PAGE)
    large = pool.allocate(3 * PAGE)
    segment = (16 << 20) // SEGMENTS_AT_LEAST
    assert large - small >= segment - PAGE
    assert pool.size_class(large) == 3 * PAGE
    pool.release(np.array([small]))
    assert pool.allocate(2 * PAGE) == small


def test_a_large_class_gets_what_a_small_one_gave_back():
    pool = SlotPool(1 << 20)
    offsets = [pool.allocate(PAGE) for _ in range(pool.room(PAGE))]
    assert pool.allocate(512 << 10) is None
    pool.release(np.array(offsets))
    assert pool.allocate(512 << 10) is not None


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_payload_without_bytes_has_no_slot(nbytes):
    with pytest.raises(UsageError):
        SlotPool(1 << 20).allocate(nbytes)


def test_a_range_in_use_cannot_be_claimed():
    pool = SlotPool(1 << 20)
    pool.allocate(PAGE)
    with pytest.raises(UsageError, match="already in use"):
        pool.claim(0, PAGE, 1)


def test_it_grows_to_its_total_and_never_shrinks():
    pool = SlotPool(1 << 20, total=(64 << 20) + PAGE)
    assert (pool.unit, pool.capacity, pool.total) == (1 << 16, 1 << 20, 64 << 20)
    offsets = [pool.allocate(PAGE) for _ in range(pool.room(PAGE))]
    assert len(offsets) == (1 << 20) // PAGE
    for capacity in ((1 << 20) - 1, (64 << 20) + pool.unit):
        with pytest.raises(UsageError, match="cannot grow"):
            pool.grow(capacity)
    pool.grow((2 << 20) + pool.unit - 1)
    assert pool.free_nbytes == 1 << 20
    assert pool.allocate(1 << 20) == 1 << 20
    with pytest.raises(UsageError, match="beyond the capacity"):
        pool.claim(2 << 20, PAGE, 1)
    pool.grow((64 << 20) + PAGE)
    assert pool.claim(2 << 20, PAGE, 1) == 2 << 20


def test_too_little_memory_is_an_error():
    with pytest.raises(ConfigError):
        SlotPool(PAGE - 1)
