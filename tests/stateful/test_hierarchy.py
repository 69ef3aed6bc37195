"""The hierarchy against what was ever committed, with sessions that come and go and tiers that are far too small."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.block import PAGE
from kvtier.client.local import LocalSession
from kvtier.errors import SessionUnavailable
from kvtier.hierarchy.answers import GrantState, Matched, Reserved
from kvtier.hierarchy.cache import Hierarchy, Limits
from kvtier.hierarchy.mover import Mover
from kvtier.hierarchy.state import State
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import key_of, payload_of
from kvtier.tiers.base import Tier, TierNumber
from kvtier.tiers.gpu import GpuTier
from kvtier.tiers.nvme import NvmeTier

CPU, GPU, NVME = TierNumber.CPU, TierNumber.GPU, TierNumber.NVME
CAPACITY = 480 << 10
LIMITS = Limits(session_leased=320 << 10, session_reserved=240 << 10)
SMALL, LARGE = 20_000, 50_000
DEPTH = 8
DROPPED = ("evict", "clear", "expired", "nvme_behind")
EXPIRY = 1 << 40
"""A kit's payload expires at this second and as many more as its seed says."""
LOST = (*(f"nvme_{why}" for why in ("evicted", "lost")), "gpu_evicted", "cpu_evicted", "condemned", *DROPPED)


def chain_of(branch: int) -> list[int]:
    """Seeds of a chain: two trunks, each with branches that share half of it; blocks of the second are larger."""
    trunk = branch // 3
    half = DEPTH // 2
    return [1000 * trunk + i for i in range(half)] + [1000 * trunk + 100 * (branch + 1) + i for i in range(half)]


def nbytes_of(seed: int) -> int:
    return LARGE if seed >= 1000 else SMALL


SEEDS = sorted({seed for branch in range(6) for seed in chain_of(branch)})
PARENT = {
    key_of(b): key_of(a) for branch in range(6) for a, b in zip(chain_of(branch), chain_of(branch)[1:], strict=False)
}
BRANCHES = st.integers(0, 5)
LENGTHS = st.integers(1, DEPTH)
PLACES = st.integers(0, 5)
SESSIONS = st.integers(0, 1)


class HierarchyMachine(RuleBasedStateMachine):
    """The keeper does not run by itself, and the movers are waited for after every rule, so that a run can be repeated.

    What races with what is in `tests/integration/test_hierarchy_threads.py` and in the unit tests.
    """

    @initialize(nvme=st.booleans(), gpu=st.booleans())
    def open(self, nvme, gpu):
        self.now = 1.0
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
        self.arena = Arena.private(CAPACITY)
        tiers: dict[TierNumber, Tier] = {}
        if nvme:
            tiers[NVME] = NvmeTier(self.folder, 1 << 20, self.arena, direct=False, threads=1)
        if gpu:
            tiers[GPU] = GpuTier(256 << 10, self.arena, "cpu")
        store = LocalStore()
        self.index = LocalIndex(store, store.register("test"))
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Mover, "start", lambda mover, chores: None)
        self.hierarchy = Hierarchy(self.arena, tiers, self.index, limits=LIMITS, clock=lambda: self.now)
        self.state = self.hierarchy.state
        self.patch.setattr(State, "leave", self._checked_leave(State.leave))
        self.orphaned: list[str] = []
        self.sessions = [LocalSession(self.hierarchy) for _ in range(2)]
        self.leases: list[tuple[int, list[int], Matched]] = []
        self.reservations: list[tuple[int, list[int], int, Reserved]] = []
        self.committed: set[int] = set()
        self.asked = 0

    def teardown(self):
        if not hasattr(self, "hierarchy"):
            return
        for session in self.sessions:
            session.close()
        self.hierarchy.unpin([key_of(seed) for seed in SEEDS])
        self.hierarchy.mover.drain()
        self.hierarchy._remove_unread()
        assert not self.state.device.leaving
        assert not self.state.device.readers
        self._table_is_true()
        pool = self.state.cpu.pool
        assert pool.used == sum(map(pool.size_class, self.state.at)), "a slot leaked"
        assert not self.state.cpu.quarantined
        assert not self.arena.writers.any()
        status = self.hierarchy.status()
        assert (status["leases"], status["leased_nbytes"], status["reservations"], status["staging"]) == (0, 0, 0, 0)
        assert not {"keeper_error", "mover_error", "staging_error"} & status["faults"].keys()
        self.hierarchy.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    # What sessions do

    @rule(who=SESSIONS, branch=BRANCHES, length=LENGTHS, wait=st.booleans(), inside=st.booleans())
    def match(self, who, branch, length, wait, inside):
        """With `inside` by who has the GPU tier's memory attached, where there is one."""
        seeds, device = chain_of(branch)[:length], self.state.device.epoch if inside else 0
        matched = self.sessions[who].match([key_of(seed) for seed in seeds], 10.0 if wait else 0.0, device=device)
        assert device or not matched.inside.any()
        self.asked += length
        assert len(matched.slots) + matched.staging <= length
        self._holds(seeds, matched)
        if matched.lease:
            self.leases.append((who, seeds[: len(matched.slots)], matched))

    @rule(at=PLACES)
    def release(self, at):
        if not self.leases:  # no precondition: what a match gets may hang on time, and which rules there are must not
            return
        who, _, matched = self.leases.pop(at % len(self.leases))
        self.sessions[who].release(matched.lease)
        self.sessions[who].release(matched.lease)

    @rule()
    def keep(self):
        """What the keeper does for the GPU tier."""
        self.hierarchy._remove_unread()
        assert self.state.device.leaving <= {
            key_of(seed)
            for _, seeds, matched in self.leases
            for seed, inside in zip(seeds, matched.inside.tolist(), strict=True)
            if inside
        }

    @rule(who=SESSIONS, branches=st.lists(BRANCHES, min_size=1, max_size=3, unique=True))
    def save(self, who, branches):
        """Whole chains, as far as there is room."""
        for branch in branches:
            seeds = chain_of(branch)
            sizes = [nbytes_of(seed) for seed in seeds]
            reserved = self.sessions[who].reserve([key_of(seed) for seed in seeds], sizes, 0)
            self._commit(who, seeds, reserved, np.flatnonzero(reserved.grants["state"] == 0).tolist())

    @rule(who=SESSIONS, branch=BRANCHES, length=LENGTHS, start=PLACES)
    def reserve(self, who, branch, length, start):
        seeds, start = chain_of(branch)[:length], start % length
        sizes = [nbytes_of(seed) for seed in seeds[start:]]
        reserved = self.sessions[who].reserve([key_of(seed) for seed in seeds], sizes, start)
        assert (GrantState.REFUSED in reserved.grants["state"]) == bool(reserved.reason)
        if reserved.ticket:
            self.reservations.append((who, seeds, start, reserved))

    @rule(at=PLACES, most=LENGTHS, garble=st.booleans())
    def commit(self, at, most, garble):
        if not self.reservations:
            return
        who, seeds, start, reserved = self.reservations.pop(at % len(self.reservations))
        granted = np.flatnonzero(reserved.grants["state"] == GrantState.GRANTED).tolist()
        written = granted[: most - 1]
        self._commit(who, seeds[start:], reserved, written, garbled=written[-1] if garble and written else None)

    def _commit(self, who, seeds, reserved, written, garbled=None):
        for i in written:
            payload, offset = payload_of(seeds[i], nbytes_of(seeds[i])), int(reserved.grants["offset"][i])
            self.arena.memory[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)
            self.arena.memory[offset + 50] ^= i == garbled
        if reserved.ticket:
            visible = self.sessions[who].commit(reserved.ticket, written)
            assert visible == [i != garbled for i in written]
        self.committed |= {seeds[i] for i in written if i != garbled}

    @rule(who=SESSIONS, branch=BRANCHES, length=LENGTHS, tier=st.sampled_from(TierNumber))
    def move(self, who, branch, length, tier):
        keys = [key_of(seed) for seed in chain_of(branch)[:length]]
        there = self.sessions[who].move(keys, tier, 30.0)
        found = [one for one in self.hierarchy.inspect(keys) if one and tier.name.lower() == one["tiers"][0]]
        assert there <= len(found) <= length or tier is GPU

    @rule(who=SESSIONS, branch=BRANCHES, length=LENGTHS, tier=st.sampled_from([CPU, GPU]))
    def prefetch(self, who, branch, length, tier):
        keys = [key_of(seed) for seed in chain_of(branch)[:length]]
        assert self.sessions[who].prefetch(keys, tier).result(30.0) <= length

    @rule(branch=BRANCHES, at=st.integers(0, DEPTH - 1), rarely=st.integers(0, 4))
    def condemn(self, branch, at, rarely):
        if rarely:
            return
        key = key_of(chain_of(branch)[at])
        self.hierarchy.condemn([key], "condemned")
        assert self.hierarchy.inspect([key]) == [None]

    @rule(who=SESSIONS, branch=BRANCHES, length=LENGTHS, seconds=st.sampled_from([1.0, 1e15]))
    def pin(self, who, branch, length, seconds):
        keys = [key_of(seed) for seed in chain_of(branch)[:length]]
        kept = self.sessions[who].pin(keys, seconds)
        assert all(one and one["leased"] for one in self.hierarchy.inspect(keys[:kept]))
        assert self.state.ledger.pinned_nbytes <= LIMITS.pinned * CAPACITY

    @rule(who=SESSIONS, branch=BRANCHES)
    def unpin(self, who, branch):
        self.sessions[who].unpin([key_of(seed) for seed in chain_of(branch)])

    @rule(branch=BRANCHES, at=st.integers(0, DEPTH - 1), everything=st.booleans(), rarely=st.integers(0, 3))
    def drop(self, branch, at, everything, rarely):
        """Of their own keyspace each: see `payload_of`."""
        if rarely:
            return
        key = key_of(chain_of(branch)[at])
        dropped = self.hierarchy.clear(key[:16]) if everything else self.hierarchy.evict([key])
        assert dropped in (0, 1)
        assert self.hierarchy.inspect([key]) == [None]

    @rule(branch=BRANCHES, at=st.integers(0, DEPTH - 1), rarely=st.integers(0, 5))
    def expire(self, branch, at, rarely):
        if not rarely:
            self.now = max(self.now, EXPIRY + chain_of(branch)[at])
        self.hierarchy._end_times()
        with self.state.lock:
            assert not any(0 < self.state.table.expires[row] <= self.now for row in self.state.table.rows.values())

    @rule(who=SESSIONS)
    def detach(self, who):
        """A session dies, and its client attaches again."""
        self.sessions[who].close()
        with pytest.raises(SessionUnavailable):
            self.sessions[who].match([key_of(0)], 0.0)
        self.sessions[who] = LocalSession(self.hierarchy)
        self.leases = [one for one in self.leases if one[0] != who]
        self.reservations = [one for one in self.reservations if one[0] != who]

    # What always holds

    @precondition(lambda self: hasattr(self, "hierarchy"))
    @invariant()
    def all_is_well(self):
        self.hierarchy.mover.drain()
        with self.state.lock:
            self._table_is_true()
            self._counters_add_up()
        for _, seeds, matched in self.leases:
            self._holds(seeds, matched)
            assert len(matched.slots) == len(seeds)
        assert not self.orphaned

    def _table_is_true(self):
        state, table, pool = self.state, self.state.table, self.state.cpu.pool
        assert {int(key_seed) for key_seed in map(self._seed, table.rows)} <= self.committed
        here = {row: int(table.offset[row]) for row in table.rows.values() if table.has(row, CPU)}
        assert {offset: row for row, offset in here.items()} == state.at
        reserved = [offset for booked in state.ledger.reservations.values() for offset in booked.offsets]
        leased = {int(o) for lease in state.ledger.leases.values() for o in lease.offsets}
        slots = {*state.at, *reserved, *leased, *(pin.offset for pin in state.ledger.pins.values())}
        assert pool.used == sum(map(pool.size_class, slots)) <= pool.capacity
        assert state.ledger.pinned_nbytes == sum(pin.nbytes for pin in state.ledger.pins.values())
        for tier, policy in state.policies.items():
            assert len(policy) == sum(table.has(row, tier) for row in table.rows.values())
        for key, row in table.rows.items():
            (replica,) = self.index.match([key])[0]
            assert (replica.tier, replica.nbytes) == (table.best(row), nbytes_of(self._seed(key)))
        assert len(self.index._store.replicas) == len(table)
        for number, tier in state.tiers.items():
            usage = tier.usage()
            assert usage.used <= usage.capacity
            known = [key for key, row in table.rows.items() if table.has(row, number)]
            assert set(known) <= set(tier.inventory().keys)
            if number is GPU:
                assert set(tier.inventory().keys) == {*known, *state.device.leaving}
                rows, slots = state.rows(known), tier.places(known).slots
                assert table.inside[rows].tolist() == slots["offset"].tolist()
                assert table.inside_generation[rows].tolist() == slots["generation"].tolist()

    def _counters_add_up(self):
        stats = self.state.stats
        assert stats.hits.total() + stats.misses.total() == self.asked
        assert stats.stored - stats.dropped.total() == len(self.state.table)
        assert set(stats.dropped) <= set(LOST)

    def _holds(self, seeds, matched):
        outside = self.arena.memory, self.sessions[0].generations()
        gpu = self.sessions[0].attach("cpu") if matched.inside.any() else None
        for seed, slot, inside in zip(seeds, matched.slots, matched.inside.tolist(), strict=False):
            memory, generations = (gpu.memory, gpu.generations) if inside else outside
            offset, nbytes = int(slot["offset"]), int(slot["nbytes"])
            assert memory[offset : offset + nbytes].data == payload_of(seed, nbytes_of(seed)), "wrong bytes"
            assert generations[offset // PAGE] == slot["generation"]

    def _seed(self, key):
        return next(seed for seed in SEEDS if key_of(seed) == key)

    def _checked_leave(self, leave):
        """Evicted from a tier, a block must have no child there that knows it."""

        def checked(state, rows, tier, why):
            table, going = state.table, {row for row in rows if state.table.has(row, tier)}
            if why.endswith(("_evicted", "_behind")) and tier in state.policies:
                for child in table.rows.values():
                    if table.has(child, tier) and child not in going and table.parent_of(child) in going:
                        self.orphaned.append(f"{why}: {table.keys[child].hex()} stays without its parent")
            leave(state, rows, tier, why)

        return checked


TestHierarchy = HierarchyMachine.TestCase
TestHierarchy.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
