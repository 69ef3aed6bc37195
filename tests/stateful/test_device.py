"""Readers of the GPU tier's memory against evictions from it: what is leased there stays what it is until its release.

The keeper does not run by itself, so that a run can be repeated.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.block import PAGE
from kvtier.client.local import LocalSession
from kvtier.hierarchy.cache import Hierarchy
from kvtier.hierarchy.mover import Mover
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import key_of, payload_of
from kvtier.testing.session import NBYTES, save
from kvtier.tiers.base import TierNumber
from kvtier.tiers.gpu import GpuTier
from kvtier_services.actors.reconcile import reconcile

GPU = TierNumber.GPU
CHAINS, BLOCKS = 7, 3
ROOM = 256 << 10
"""Of the GPU tier: 12 of the 21 blocks."""
CHAIN = st.integers(0, CHAINS - 1)
SOME = st.lists(CHAIN, min_size=1, max_size=3, unique=True)
LENGTH = st.integers(1, BLOCKS)


def seeds_of(chain: int) -> list[int]:
    return list(range(100 * chain, 100 * chain + BLOCKS))


class DeviceMachine(RuleBasedStateMachine):
    @initialize()
    def open(self):
        self.arena = Arena.private(2 << 20)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Mover, "start", lambda mover, chores: None)
        store = LocalStore()
        index = LocalIndex(store, store.register("test"))
        self.gpu = GpuTier(ROOM, self.arena, "cpu")
        self.hierarchy = Hierarchy(self.arena, {GPU: self.gpu}, index)
        self.state = self.hierarchy.state
        self.session = LocalSession(self.hierarchy)
        self.leases: list[tuple[int, list[int], object]] = []
        self.attach()
        self.save_and_promote(range(CHAINS))

    def attach(self):
        """As clients do when the host says another epoch."""
        self.memory = self.session.attach("cpu")

    def teardown(self):
        if not hasattr(self, "hierarchy"):
            return
        self.session.close()
        self.keep()
        self._the_tier_has_what_the_table_says()
        assert not self.state.device.leaving
        assert not self.state.device.readers
        self.hierarchy.close()
        self.patch.undo()

    @rule(chains=SOME)
    def save_and_promote(self, chains):
        for chain in chains:
            keys = [key_of(seed) for seed in seeds_of(chain)]
            save(self.session, 100 * chain, BLOCKS)
            self.session.prefetch(keys, GPU).result(30.0)

    @rule(chains=SOME, length=LENGTH)
    def match(self, chains, length):
        for chain in chains:
            seeds = seeds_of(chain)[:length]
            matched = self.session.match([key_of(seed) for seed in seeds], 0.0, device=self.memory.epoch)
            if matched.lease:
                self.leases.append((self.memory.epoch, seeds[: len(matched.slots)], matched))

    @rule(at=st.integers(0, 9))
    def release(self, at):
        if not self.leases:  # no precondition: what a match gets may hang on time, and which rules there are must not
            return
        _, _, matched = self.leases.pop(at % len(self.leases))
        self.session.release(matched.lease)

    @rule(chain=CHAIN, at=st.integers(0, BLOCKS - 1))
    def drop(self, chain, at):
        self.hierarchy.evict([key_of(seeds_of(chain)[at])])

    @rule(chain=CHAIN)
    def move_down(self, chain):
        self.session.move([key_of(seed) for seed in seeds_of(chain)], TierNumber.CPU, 30.0)

    @rule()
    def keep(self):
        self.hierarchy._remove_unread()

    @rule()
    def connect_again(self):
        """The way to the tier was lost for a moment."""
        reconcile(self.state, GPU)

    @rule(rarely=st.integers(0, 5))
    def restart(self, rarely):
        if rarely:
            return
        self.gpu.close()
        self.gpu = GpuTier(ROOM, self.arena, "cpu")
        self.state.tiers[GPU] = self.state.device._tier = self.gpu
        reconcile(self.state, GPU)
        assert not self.memory.current
        self.attach()

    @rule(rarely=st.integers(0, 2))
    def detach(self, rarely):
        if rarely:
            return
        self.session.close()
        self.session = LocalSession(self.hierarchy)
        self.leases = []

    @precondition(lambda self: hasattr(self, "hierarchy"))
    @invariant()
    def what_is_leased_is_what_it_was(self):
        self.hierarchy.mover.drain()
        self._the_tier_has_what_the_table_says()
        for epoch, seeds, matched in self.leases:
            for seed, slot, inside in zip(seeds, matched.slots, matched.inside.tolist(), strict=True):
                if inside and epoch != self.memory.epoch:
                    continue
                offset = int(slot["offset"])
                memory = self.memory.memory if inside else self.arena.memory
                generations = self.memory.generations if inside else self.arena.generations
                assert memory[offset : offset + NBYTES].data == payload_of(seed, NBYTES), "wrong bytes"
                assert generations[offset // PAGE] == slot["generation"]

    def _the_tier_has_what_the_table_says(self):
        table = self.state.table
        known = [key for key, row in table.rows.items() if table.has(row, GPU)]
        held = set(self.gpu.inventory().keys)
        assert set(known) <= held <= {*known, *self.state.device.leaving}
        rows, places = self.state.rows(known), self.gpu.places(known)
        assert table.inside[rows].tolist() == places.slots["offset"].tolist()


TestDevice = DeviceMachine.TestCase
TestDevice.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
