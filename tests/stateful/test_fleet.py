"""Two hosts that share an index and reach one another, against what was ever committed on either."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.block import PAGE
from kvtier.hierarchy import lending, seeking
from kvtier.hierarchy.cache import Limits
from kvtier.hierarchy.mover import Mover
from kvtier.hierarchy.sharing import Sharing
from kvtier.testing.payloads import key_of, payload_of
from kvtier.tiers.base import TierNumber
from tests.fleet_fixture import Fleet, patiently
from tests.hierarchy_fixture import NBYTES, fill, keys, reserve

BLOCKS, DEPTH = 14, 6
LIMITS = Limits(session_leased=8 * NBYTES, session_reserved=8 * NBYTES)
NAMES = ("a", "b")
WHO, BRANCHES, LENGTHS, PLACES = st.sampled_from(NAMES), st.integers(0, 3), st.integers(1, DEPTH), st.integers(0, 7)


def chain_of(branch: int) -> list[int]:
    """Seeds of a chain; two of them share their first half."""
    half = DEPTH // 2
    return [100 * (branch // 2) + i for i in range(half)] + [1000 * (branch + 1) + i for i in range(half)]


class FleetMachine(RuleBasedStateMachine):
    """The keepers do not run by themselves, and lookups and flights are waited for after every rule.

    What races is in `tests/integration/test_fleet.py` and in the unit tests.
    """

    @initialize(disks=st.booleans())
    def open(self, disks):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Mover, "start", lambda mover, chores: None)
        self.patch.setattr(lending, "QUEUE", 0.0)
        patiently(self.patch)
        self.fleet = Fleet(patience=0.05)
        self.disk = 1 << 20 if disks else None
        self.hosts = {name: self.fleet.host(name, BLOCKS, nvme=self.disk, limits=LIMITS) for name in NAMES}
        self.sessions = {name: host.session() for name, host in self.hosts.items()}
        self.leases = []
        self.lent = []
        self.committed: set[int] = set()

    def teardown(self):
        if not hasattr(self, "hosts"):
            return
        for name, lent in self.lent:
            self.hosts[name].hierarchy.lending.give_back(lent)
        for session in self.sessions.values():
            session.close()
        for host in self.hosts.values():
            host.mover.drain()
            host.check()
            status = host.hierarchy.status()
            assert (status["leases"], status["leased_nbytes"], status["staging"]) == (0, 0, 0)
            assert not {"keeper_error", "mover_error", "staging_error", "seek_error"} & status["faults"].keys()
            assert not host.state.ledger.sessions
        self.fleet.__exit__()
        self.patch.undo()

    @rule(who=WHO, branch=BRANCHES, length=LENGTHS)
    def save(self, who, branch, length):
        seeds, session = chain_of(branch)[:length], self.sessions[who]
        reserved = reserve(session, seeds)
        if reserved.ticket:
            written = fill(session, reserved, seeds)
            visible = session.commit(reserved.ticket, written)
            self.committed |= {seeds[i] for i, ok in zip(written, visible, strict=True) if ok}

    @rule(who=WHO, branch=BRANCHES, length=LENGTHS, wait=st.booleans(), stream=st.booleans())
    def match(self, who, branch, length, wait, stream):
        seeds, host = chain_of(branch)[:length], self.hosts[who]
        before = host.stats.hits.total() + host.stats.misses.total()
        matched = self.sessions[who].match(keys(seeds), 10.0 if wait else 0.0, stream=stream and not wait)
        assert len(matched.slots) + matched.staging <= length
        assert {*seeds[: len(matched.slots) + matched.staging]} <= self.committed
        if not stream or wait:
            assert host.stats.hits.total() + host.stats.misses.total() == before + length
        if matched.lease:
            self.leases.append((who, seeds, matched))

    @rule(at=PLACES)
    def release(self, at):
        # No precondition: what a match gets may hang on time, and which rules there are must not.
        if self.leases:
            who, _, matched = self.leases.pop(at % len(self.leases))
            self.sessions[who].release(matched.lease)

    @rule(who=WHO, branch=BRANCHES, length=LENGTHS)
    def prefetch(self, who, branch, length):
        self.sessions[who].prefetch(keys(chain_of(branch)[:length]), TierNumber.CPU).result(10.0)

    @rule(who=WHO, branch=BRANCHES, length=LENGTHS)
    def demote(self, who, branch, length):
        self.sessions[who].move(keys(chain_of(branch)[:length]), TierNumber.NVME, 10.0)

    @rule(who=WHO, branch=BRANCHES, at=st.integers(0, DEPTH - 1))
    def evict(self, who, branch, at):
        key = key_of(chain_of(branch)[at])
        assert self.hosts[who].hierarchy.evict([key]) in (0, 1)
        assert self.hosts[who].hierarchy.inspect([key]) == [None]

    @rule(who=WHO, branch=BRANCHES, length=LENGTHS)
    def lend(self, who, branch, length):
        """To a third host, which may hold it for long."""
        seeds = chain_of(branch)[:length]
        lent = self.hosts[who].hierarchy.lending.lend("c", keys(seeds), np.full(length, NBYTES, np.int64), 0.05)
        if lent.lease:
            self.lent.append((who, lent))
        for seed, offset in zip(seeds, lent.slots.offsets.tolist(), strict=True):
            assert offset < 0 or self.hosts[who].arena.payload(offset, NBYTES) == payload_of(seed, NBYTES)

    @rule(at=PLACES)
    def give_back(self, at):
        if self.lent:
            who, lent = self.lent.pop(at % len(self.lent))
            self.hosts[who].hierarchy.lending.give_back(lent)

    @rule(who=WHO, branch=BRANCHES, offer=st.booleans())
    def travel(self, who, branch, offer):
        """One host saves a chain, and the other one asks for it, or is offered what is used."""
        self.save(who, branch, DEPTH)
        if not offer:
            self.match(*(name for name in NAMES if name != who), branch, DEPTH, wait=True, stream=False)
            return
        session = self.sessions[who]
        for _ in range(2):
            session.release(session.match(keys(chain_of(branch)), 0.0).lease)
        Sharing(self.hosts[who].state, 1).replicate()

    @rule(who=WHO)
    def part(self, who):
        """A host is out of reach, or again within."""
        self.fleet.network.unreachable ^= {self.hosts[who].door}

    @rule(who=WHO, branch=BRANCHES, at=st.integers(0, DEPTH - 1))
    def damage(self, who, branch, at):
        """What comes from elsewhere of one block is damaged on its way from now on."""
        self.hosts[who].peers.corrupt ^= {key_of(chain_of(branch)[at])}

    @rule(seconds=st.sampled_from([1.0, 3.0, 30.0]))
    def wait(self, seconds):
        for host in self.hosts.values():
            host.now += seconds
            host.mover.stager.seeker.sweep()
            assert all(0 <= host.now - since <= seeking.STALE for since in host.state.abroad.values())

    @rule(who=WHO)
    def restart(self, who):
        """Its memory is gone; the index forgets what it told."""
        self.leases = [one for one in self.leases if one[0] != who]
        self.lent = [one for one in self.lent if one[0] != who]
        self.hosts[who].__exit__()
        self.hosts[who] = self.fleet.host(who, BLOCKS, nvme=self.disk, limits=LIMITS)
        self.sessions[who] = self.hosts[who].session()

    @precondition(lambda self: hasattr(self, "hosts"))
    @invariant()
    def all_is_well(self):
        for host in self.hosts.values():
            host.settle()
            host.mover.drain()
        for host in self.hosts.values():
            state = host.state
            with state.lock:
                assert {key for key in state.table.rows if key not in state.abroad} <= set(keys(self.committed))
                slots = {*state.at}
                slots |= {int(offset) for lease in state.ledger.leases.values() for offset in lease.offsets}
                pool = state.cpu.pool
                assert pool.used == sum(map(pool.size_class, slots)) <= pool.capacity
                assert len(state.abroad) == sum(
                    bool(int(state.table.tiers[row]) >> TierNumber.PEER & 1) for row in state.table.rows.values()
                )
                stored = host.stats.stored + host.stats.moves["peer", "cpu"] - host.stats.dropped.total()
                assert stored == len(state.table) - len(state.abroad)
        for who, seeds, matched in self.leases:
            for seed, slot in zip(seeds, matched.slots, strict=False):
                offset = int(slot["offset"])
                host = self.hosts[who]
                assert host.arena.payload(offset, NBYTES) == payload_of(seed, NBYTES), "wrong bytes"
                assert host.arena.generations[offset // PAGE] == slot["generation"]


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
