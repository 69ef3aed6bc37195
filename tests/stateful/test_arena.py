"""Owners of one arena, killed and followed by others while it gets its memory, against a list of who writes where."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.block import PAGE, slot_nbytes
from kvtier.memory.arena import Arena
from kvtier.memory.filling import Filling
from kvtier.tiers.cpu import CpuTier

STEP = 32 * PAGE
SIZE = 5 * STEP - 3 * PAGE
SIZES = st.sampled_from([PAGE, 3 * PAGE, 30_000, STEP + PAGE])


class ArenaMachine(RuleBasedStateMachine):
    """`writing`: (writer, offset, bytes) of every slot that a session, of any life, may be writing into."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("kvtier.memory.filling.STEP", STEP)
        self.patch.setattr(Filling, "start", lambda _: None)
        self.folder = Path(tempfile.mkdtemp(prefix="kvt-arena-"))
        self.writing: list[tuple[int, int, int]] = []
        self.sessions = 0

    @initialize(pinned=st.booleans(), steps=st.integers(0, 5))
    def begin(self, pinned, steps):
        self.own(pinned)
        self.fill(steps, True)

    @precondition(lambda self: self.tier.pool.used)
    @rule(pinned=st.sampled_from([True, True, False]))
    def follow(self, pinned):
        """The owner dies: what it knew is gone, but not who may be writing."""
        self.arena.close()
        self.own(pinned)

    def own(self, pinned):
        self.arena = Arena.own(self.folder, SIZE, pin=(lambda _: None) if pinned else None)
        self.tier = CpuTier(self.arena)
        self.session = self.sessions = self.sessions + 1
        self.held: list[tuple[int, int]] = []

    @rule(steps=st.sampled_from([1, 1, 5]), grow=st.booleans())
    def fill(self, steps, grow):
        for _ in range(steps):
            self.arena.filling.step()
        if grow:
            self.tier.grow()
            assert self.tier.pool.capacity == self.arena.ready // self.tier.pool.unit * self.tier.pool.unit

    @rule()
    def find_it_full(self):
        ready = self.arena.ready

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            self.arena.filling.step()
        assert ready <= self.arena.ready <= self.arena.allocated[0]

    @rule(nbytes=SIZES, writes=st.sampled_from([True, True, False]), times=st.sampled_from([1, 40, SIZE // PAGE]))
    def grant(self, nbytes, writes, times):
        """Grant slots, as many as there are if need be."""
        while times and (slot := self.tier.grant(nbytes, self.session if writes else 0)):
            self.check(slot, nbytes, writes)
            times -= 1

    def check(self, slot, nbytes, writes):
        end = slot[0] + slot_nbytes(nbytes)
        taken = [(offset, size) for _, offset, size in self.writing] + self.held
        assert all(end <= offset or offset + slot_nbytes(size) <= slot[0] for offset, size in taken)
        assert end <= self.arena.ready <= self.arena.allocated[0]
        if writes:
            self.writing.append((self.session, slot[0], nbytes))
        else:
            self.held.append((slot[0], nbytes))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(self.held))
        self.held.remove(slot)
        self.tier.pool.release(np.array([slot[0]]))

    @rule(data=st.data())
    def commit(self, data):
        """A session of this life is done with a slot, and its block stays."""
        mine = [slot for slot in self.writing if slot[0] == self.session]
        if mine:
            slot = data.draw(st.sampled_from(mine))
            self.writing.remove(slot)
            self.tier.written(*slot[1:])
            self.held.append(slot[1:])

    @rule()
    def cut_off(self):
        """This life's session loses its connection; another one comes."""
        self.tier.quarantine(self.session, [offset for writer, offset, _ in self.writing if writer == self.session])
        self.session = self.sessions = self.sessions + 1

    @rule(data=st.data())
    def end(self, data):
        """A session that was cut off, in this life or before, is seen to be dead; as far as the tier knows of it."""
        known = sorted(self.tier.quarantined)
        if known:
            gone = data.draw(st.sampled_from(known))
            assert self.tier.absolve(gone)
            self.writing = [slot for slot in self.writing if slot[0] != gone]

    @invariant()
    def what_was_granted_has_memory(self):
        file = self.folder / "arena"
        if file.exists():
            assert file.stat().st_blocks * 512 >= self.arena.allocated[0] >= self.arena.ready
            assert self.tier.pool.capacity <= self.arena.ready

    @invariant()
    def who_may_write_is_written_down(self):
        if (self.folder / "arena").exists():
            marks = np.zeros_like(self.arena.writers)
            for writer, offset, nbytes in self.writing:
                marks[offset // PAGE : (offset + slot_nbytes(nbytes)) // PAGE] = writer
            assert np.array_equal(marks, self.arena.writers)

    def teardown(self):
        try:
            if hasattr(self, "arena"):
                self.end_all()
        finally:
            shutil.rmtree(self.folder)
            self.patch.undo()

    def end_all(self):
        """When all is allocated and all writers have ended, one life has everything."""
        while self.arena.filling.step():
            pass
        self.tier.grow()
        self.tier.quarantine(self.session, [offset for writer, offset, _ in self.writing if writer == self.session])
        for writer in list(self.tier.quarantined):
            self.tier.absolve(writer)
        for offset, _ in self.held:
            self.tier.pool.release(np.array([offset]))
        assert self.tier.pool.room(PAGE) == self.tier.pool.capacity // PAGE == SIZE // PAGE
        assert not self.arena.writers.any()
        self.arena.close()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
