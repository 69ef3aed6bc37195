"""A router's view against the table, whatever happens, with everything that is bounded far too small.

Host, publisher, sockets and subscriber are the real ones. The router stops reading at any time, in the middle of dumps
too; the ring keeps three batches, a dump has three rows a part, 25 changes are too many at once.
"""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvtier.events import Subscriber, View
from kvtier.events import publisher as module
from kvtier.events.publisher import Publisher
from kvtier.tiers.base import OWN, TierNumber
from tests.hierarchy_fixture import SLOT_NBYTES, Host, keys, save

CHAINS = [[*range(4), *range(10 * n, 10 * n + 6)] for n in range(1, 6)]
SEEDS = sorted({seed for chain in CHAINS for seed in chain})
PATIENCE = 20.0


class Following(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "PART", 3)
        self.patch.setattr(module, "INTERVAL", 0.002)
        self.host = Host(blocks=14, nvme=24 * SLOT_NBYTES, gpu=6 * SLOT_NBYTES)
        self.session = self.host.session()
        self.start()

    def start(self) -> None:
        self.publisher = Publisher(self.host.state, "tcp://127.0.0.1:0", buffer=3)
        self.publisher._news._most = 25
        where = self.publisher.status()
        self.subscriber = Subscriber(where["endpoint"], where["replay_endpoint"], check=0.02)
        self.view = View()

    def teardown(self) -> None:
        try:
            self.check()
        finally:
            self.subscriber.close()
            self.publisher.close()
            self.host.__exit__()
            self.patch.undo()

    @rule(chain=st.sampled_from(CHAINS), length=st.integers(1, 10))
    def save(self, chain, length):
        save(self.session, chain[:length])

    @rule(chain=st.sampled_from(CHAINS), wait=st.sampled_from([0.0, 0.2]))
    def load(self, chain, wait):
        self.session.release(self.session.match(keys(chain), wait).lease)

    @rule(chain=st.sampled_from(CHAINS), tier=st.sampled_from([TierNumber.NVME, TierNumber.CPU, TierNumber.GPU]))
    def move(self, chain, tier):
        with suppress(Exception):
            self.host.hierarchy.move(keys(chain), tier).result(0.2)

    @rule(chain=st.sampled_from(CHAINS), start=st.integers(0, 9))
    def evict(self, chain, start):
        self.session.evict(keys(chain[start:]))

    @rule(seed=st.sampled_from(SEEDS))
    def forget_on_disk(self, seed):
        if self.host.nvme.seeds([seed]):
            self.host.nvme.evict(seed)

    @rule(batches=st.integers(1, 4))
    def read(self, batches):
        for _ in range(batches):
            batch = self.subscriber.receive(0.0)
            if batch is not None:
                self.view.apply(batch)

    @rule()
    def begin_anew(self):
        self.subscriber.close()
        self.publisher.close()
        self.start()

    @rule()
    def check(self):
        """At a quiet moment the view is the table."""
        deadline = time.monotonic() + PATIENCE
        while not self.same():
            assert time.monotonic() < deadline, self.difference()
            batch = self.subscriber.receive(0.01)
            if batch is not None:
                self.view.apply(batch)

    def same(self) -> bool:
        return not self.difference()

    def difference(self) -> dict:
        table = self.host.state.table
        with self.host.state.lock:
            there = {
                seed: {tier.name.lower() for tier in OWN if table.has(row, tier)}
                for seed in SEEDS
                if (row := table.rows.get(keys([seed])[0])) is not None
            }
        seen = {seed: set(tiers) for seed in SEEDS if (tiers := self.view.tiers(keys([seed])[0]))}
        both = there.keys() | seen.keys()
        return {seed: (there.get(seed), seen.get(seed)) for seed in both if there.get(seed) != seen.get(seed)}


Following.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestFollowing = Following.TestCase
