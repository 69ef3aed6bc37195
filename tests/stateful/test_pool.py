"""The slot pool against a dict of what was granted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.block import PAGE, slot_nbytes
from kvtier.errors import UsageError
from kvtier.memory.pool import SlotPool

SIZES = st.sampled_from([1, 3000, PAGE, 5000, 3 * PAGE, 30_000, 65_536 + 192, 200_000])


class PoolMachine(RuleBasedStateMachine):
    """`granted`: size and references by offset."""

    @initialize(
        capacity=st.sampled_from([PAGE, 300_000, 1 << 20]),
        unit=st.sampled_from([None, PAGE, 16 * PAGE]),
        more=st.sampled_from([0, 1, 100_000, 1 << 20]),
    )
    def make(self, capacity, unit, more):
        self.pool = SlotPool(capacity, unit=unit if unit and unit <= capacity else None, total=capacity + more)
        self.total = capacity + more
        assert self.pool.capacity <= capacity
        self.granted: dict[int, tuple[int, int]] = {}

    @rule(nbytes=SIZES)
    def allocate(self, nbytes):
        promised = self.pool.room(nbytes)
        offset = self.pool.allocate(nbytes)
        assert (offset is not None) == (promised > 0)
        if offset is not None:
            assert offset % PAGE == 0
            self.granted[offset] = (slot_nbytes(nbytes), 1)
            assert self.pool.size_class(offset) == slot_nbytes(nbytes)
            assert self.pool.room(nbytes) == promised - 1

    @rule(part=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    def grow(self, part):
        """Nothing that was granted moves, and what there is more is free."""
        before, free = self.pool.capacity, self.pool.free_nbytes
        self.pool.grow(int(before + part * (self.total - before)))
        assert before <= self.pool.capacity <= self.total
        assert self.pool.free_nbytes - free == self.pool.capacity - before

    @rule(nbytes=SIZES)
    def fill(self, nbytes):
        """`room` is honest: exactly so many more are granted."""
        promised = self.pool.room(nbytes)
        offsets = [self.pool.allocate(nbytes) for _ in range(promised)]
        assert None not in offsets
        assert self.pool.allocate(nbytes) is None
        self.pool.release(np.array(offsets, np.int64))

    @rule(at=st.integers(0, 1 << 20), nbytes=SIZES, references=st.integers(1, 3))
    def claim(self, at, nbytes, references):
        """Only what overlaps nothing that is granted can be claimed."""
        offset = at // PAGE * PAGE
        try:
            base = self.pool.claim(offset, nbytes, references)
        except UsageError:
            return
        size = self.pool.size_class(base)
        assert base <= offset
        assert offset + nbytes <= base + size <= self.pool.capacity
        self.granted[base] = (size, references)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def retain(self, data):
        offset = data.draw(st.sampled_from(sorted(self.granted)))
        times = data.draw(st.integers(1, 3))
        self.pool.retain(np.full(times, offset, np.int64))
        size, references = self.granted[offset]
        self.granted[offset] = size, references + times

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def release(self, data):
        offsets = data.draw(st.lists(st.sampled_from(sorted(self.granted)), max_size=6))
        wanted = {offset: offsets.count(offset) for offset in offsets}
        if any(count > self.granted[offset][1] for offset, count in wanted.items()):
            with pytest.raises(UsageError):
                self.pool.release(np.array(offsets, np.int64))
            return
        freed = self.pool.release(np.array(offsets, np.int64))
        for offset, count in wanted.items():
            size, references = self.granted[offset]
            if references == count:
                del self.granted[offset]
            else:
                self.granted[offset] = size, references - count
        assert sorted(freed) == sorted(offset for offset in wanted if offset not in self.granted)

    @invariant()
    def slots_are_disjoint_and_counted(self):
        end = 0
        for offset, (size, references) in sorted(self.granted.items()):
            assert offset >= end
            end = offset + size
            assert self.pool.references(offset) == references
            assert offset in self.pool.neighbours(offset)
        assert end <= self.pool.capacity
        assert self.pool.used == sum(size for size, _ in self.granted.values())
        assert self.pool.blocks == len(self.granted)
        assert self.pool.free_nbytes == self.pool.capacity - self.pool.used

    def teardown(self):
        """Nothing leaks: when all is released, one class can have everything again."""
        if not hasattr(self, "pool"):
            return
        for offset, (_, references) in self.granted.items():
            self.pool.release(np.full(references, offset, np.int64))
        self.pool.grow(self.total)
        assert self.pool.used == self.pool.blocks == 0
        assert self.pool.room(PAGE) * PAGE == self.pool.capacity


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
