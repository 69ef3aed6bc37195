"""What expires, and what is worth loading. Pins and dropping are in the session kit."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvtier.errors import TierUnavailable
from kvtier.hierarchy import stock
from kvtier.hierarchy.answers import GrantState
from kvtier.hierarchy.loading import Wish
from kvtier.hierarchy.pace import FRESH, Pace, worth
from kvtier.testing.payloads import key_of
from kvtier.tiers.base import TierNumber
from tests.hierarchy_fixture import Host, keys, reserve, save, states

EXPIRY = 1 << 40
"""A kit's payload expires at this second and as many more as its seed says."""
CPU, NVME = TierNumber.CPU, TierNumber.NVME


def test_what_has_expired_is_gone_everywhere():
    with Host() as host:
        session = host.session()
        save(session, range(5))
        session.move(keys(range(5)), NVME, 5.0)
        session.prefetch(keys(range(5)), CPU).result(5.0)
        with host.state.lock:  # the background cannot drop them yet
            host.now = EXPIRY + 1.5
            assert session.match(keys(range(5)), 0.0).lease == 0, "the first has expired"
            assert states(reserve(session, [0, 1, 2])) == [GrantState.BUSY, GrantState.BUSY, GrantState.STORED]
        host.hierarchy._end_times()
        host.mover.drain()
        assert [host.tiers_of(seed) for seed in range(5)] == [[]] * 2 + [["cpu", "nvme"]] * 3
        assert host.nvme.seeds(range(5)) == {2, 3, 4}
        assert host.stats.dropped == {"expired": 2}
        assert states(reserve(session, [0, 1])) == [GrantState.GRANTED] * 2
        host.check()


def test_expiry_outlives_a_restart():
    with Host(stored=range(4)) as host:
        host.now = EXPIRY + 0.5
        host.hierarchy._end_times()
        assert [host.tiers_of(seed) for seed in range(4)] == [[]] + [["nvme"]] * 3


def test_a_restarted_host_knows_the_keyspaces_of_its_blocks():
    with Host(stored=range(4)) as host:
        assert host.hierarchy.clear(key_of(2)[:16]) == 1
        assert [host.tiers_of(seed) for seed in range(4)] == [["nvme"]] * 2 + [[]] + [["nvme"]]


def test_a_tier_that_was_away_is_told_later_what_was_dropped():
    with Host(stored=range(3)) as host:

        def away() -> None:
            raise TierUnavailable("away")

        host.nvme.hooks["remove"] = away
        assert host.hierarchy.evict(keys([0, 1])) == 2
        assert host.nvme.seeds(range(3)) == {0, 1, 2}
        with pytest.raises(TierUnavailable):
            stock.settle(host.state, NVME)
        host.nvme.hooks.clear()
        stock.settle(host.state, NVME)
        assert host.nvme.seeds(range(3)) == {2}
        calls = host.nvme.calls["remove"]
        stock.settle(host.state, NVME)
        assert host.nvme.calls["remove"] == calls, "once is enough"
        host.check()


def test_what_a_tier_has_not_heard_of_is_not_written_there_anew():
    """It would say that it has the block: the old one."""
    with Host() as host:
        session = host.session()
        save(session, [1, 2])
        session.move(keys([1, 2]), NVME, 5.0)

        def busy() -> None:
            raise TierUnavailable("busy")

        host.nvme.hooks["remove"] = busy
        assert host.hierarchy.evict(keys([1])) == 1
        assert save(session, [1]) == 1
        assert session.move(keys([1]), NVME, 5.0) == 0
        assert host.tiers_of(1) == ["cpu"]
        host.nvme.hooks.clear()
        host.mover.settle(NVME)
        host.mover.drain()
        assert host.nvme.seeds([1, 2]) == {2}
        assert session.move(keys([1]), NVME, 5.0) == 1
        host.check()


def test_a_tier_that_missed_much_is_gone_through_when_it_is_back(monkeypatch):
    """What it missed is not remembered without end; nothing that was dropped comes back all the same."""
    monkeypatch.setattr("kvtier.hierarchy.state.OWED", 2)
    with Host() as host:
        session = host.session()
        save(session, range(6))
        session.move(keys(range(6)), NVME, 5.0)

        def away() -> None:
            raise TierUnavailable("away")

        host.nvme.hooks["remove"] = away
        assert host.hierarchy.evict(keys(range(4))) == 4
        assert host.state.owed[NVME] == set()
        assert save(session, [1, 20]) == 2
        assert session.move(keys([1, 20]), NVME, 5.0) == 0, "it may still have what was dropped"
        host.nvme.hooks.clear()
        with stock.stocktaking(host.state, NVME) as dropped:
            stock.take_stock(host.state, NVME, host.nvme.inventory(), dropped)
        assert host.nvme.seeds(range(30)) == {4, 5}
        assert session.move(keys([1, 20]), NVME, 5.0) == 2
        host.check()


def test_the_keeper_tells_every_tier_though_one_stays_away(monkeypatch):
    monkeypatch.setattr("kvtier.hierarchy.cache.SETTLING", 0.0)
    with Host(gpu=4 << 20) as host:
        session = host.session()
        save(session, [1, 2])
        session.match(keys([1, 2]), 0.0)
        host.mover.drain()

        def away() -> None:
            raise TierUnavailable("away")

        for tier in (host.nvme, host.gpu):
            tier.hooks["remove"] = away
        host.hierarchy.evict(keys([1]))
        first, second = list(host.state.owed)
        host.state.tiers[second].hooks.clear()
        for _ in range(200):
            if not host.state.owed[second]:
                break
            threading.Event().wait(0.05)
        assert not host.state.owed[second]
        assert host.state.owed[first]


def test_the_keeper_tells_again_what_was_not_heard(monkeypatch):
    monkeypatch.setattr("kvtier.hierarchy.cache.SETTLING", 0.0)
    with Host(stored=range(3)) as host:
        told = threading.Event()

        def busy() -> None:
            host.nvme.hooks["remove"] = told.set
            raise TierUnavailable("busy once")

        host.nvme.hooks["remove"] = busy
        host.hierarchy.evict(keys([0]))
        assert told.wait(10.0)
        host.mover.drain()
        assert host.nvme.seeds(range(3)) == {1, 2}


def test_long_chains_are_linked_in_any_order():
    """20,000 blocks whose parents nobody knows; then in the order of their numbers turned round."""
    count = 20_000
    for order in (np.arange(count), np.arange(count)[::-1]):
        with Host(nvme=None) as host:
            rows = [host.state.table.add(b"%d" % i, 1, -1, 0.0) for i in range(count)]
            host.state.link(np.array(rows, np.int64)[order])
            parents = [host.state.table.parent_of(row) for row in order.tolist()]
            assert parents == [None, *order.tolist()[:-1]]
            host.state.link(np.array([rows[order[-1]], rows[order[0]]], np.int64))
            assert host.state.table.parent_of(int(order[0])) is None, "nobody becomes his own ancestor"
            host.state.table.rows.clear()


def test_what_is_pinned_ends_when_it_is_condemned():
    with Host() as host:
        session = host.session()
        save(session, [1, 2])
        assert session.pin(keys([1, 2]), 10.0) == 2
        session.condemn(keys([1]), "bad_header")
        assert host.hierarchy.status()["pins"] == 1
        host.check()


def test_a_pin_is_kept_for_the_longer_of_two_times():
    with Host() as host:
        session = host.session()
        save(session, [1])
        for seconds in (50.0, 10.0):
            assert session.pin(keys([1]), seconds) == 1
        host.now += 20.0
        host.hierarchy._end_times()
        assert host.hierarchy.status()["pins"] == 1
        host.now += 40.0
        host.hierarchy._end_times()
        assert host.hierarchy.status()["pins"] == 0


def test_the_oldest_holdings_are_shown_with_their_owners():
    with Host() as host:
        host.hierarchy.attach(77, "engine pid 5")
        session = host.session()
        save(session, [1, 2])
        host.hierarchy.match(Wish(77, keys([1, 2])))
        host.now += 30.0
        reserve(session, [5])
        first, second = host.hierarchy.status()["held"]
        assert (first["kind"], first["owner"], first["age"], first["stuck"]) == ("lease", "engine pid 5", 30.0, True)
        assert (second["kind"], second["age"], second["stuck"]) == ("reservation", 0.0, False)
        assert "pid" in second["owner"]


def test_too_much_that_waits_is_refused():
    with Host(stored=range(10)) as host:
        session = host.session()
        reached, go_on = threading.Event(), threading.Event()

        def hook() -> None:
            reached.set()
            assert go_on.wait(10.0)

        host.nvme.hooks["read"] = hook
        waiting = [session.prefetch(keys([0]), CPU)]
        assert reached.wait(10.0)
        waiting += [session.prefetch(keys([0]), CPU) for _ in range(400)]
        refused = [future for future in waiting if future.done()]
        assert len(refused) == host.stats.faults["moves_refused"] == 401 - 256
        assert host.hierarchy.status()["queues"]["moves"] == 256
        go_on.set()
        assert all(future.result(10.0) == 1 for future in waiting if future not in refused)
        assert host.hierarchy.status()["queues"]["moves"] == 0


class TestWorth:
    def test_all_or_nothing_of_one_tier(self):
        """64 tokens a block: 0.64 s to compute at 100 tokens a second."""
        tokens = np.full(10, 64)
        assert worth(tokens, np.full(10, 0.63), 100.0) == 10
        assert worth(tokens, np.full(10, 0.65), 100.0) == 0

    def test_a_slow_beginning_is_worth_it_for_what_lies_behind(self):
        """Block by block 1.36 s lost, 0.54 and 0.54 gained, then 0.34 gained: 3 blocks lose, 4 gain 0.06 s."""
        tokens, seconds = np.full(4, 64), np.array([2.0, 0.1, 0.1, 0.3])
        assert [worth(tokens[:n], seconds[:n], 100.0) for n in (1, 2, 3, 4)] == [0, 0, 0, 4]

    def test_a_slow_end_is_left_out(self):
        assert worth(np.full(4, 64), np.array([0.1, 0.1, 0.7, 0.7]), 100.0) == 2

    def test_nothing_is_nothing(self):
        assert worth(np.zeros(0, np.int64), np.zeros(0), 100.0) == 0


class TestPace:
    def test_it_is_the_middle_one_of_late(self):
        pace = Pace()
        for n, seconds in enumerate((0.01, 0.02)):
            pace.observe(NVME, 10_000_000, seconds, float(n))
            assert pace.slowness(NVME, float(n)) == 0.0, "too little is known"
        pace.observe(NVME, 10_000_000, 600.0, 2.0)
        assert pace.slowness(NVME, 2.0) == pytest.approx(2e-9)
        assert pace.slowness(CPU, 2.0) == 0.0
        assert pace.slowness(NVME, FRESH) > 0.0
        assert pace.slowness(NVME, 0.1 + FRESH) == 0.0

    def test_small_transfers_say_nothing(self):
        pace = Pace()
        pace.observe(NVME, 1000, 1.0, 0.0)
        assert pace.slowness(NVME, 0.0) == 0.0

    def test_a_slow_tier_is_declined_and_asked_again_later(self):
        with Host(stored=range(4)) as host:
            session = host.session()
            for _ in range(3):
                host.state.pace.observe(NVME, 10 << 20, 10.0, host.now)  # 20,000 bytes take 0.02 s
            assert session.match(keys(range(4)), 5.0, prefill=64 / 0.01).lease == 0
            assert host.stats.misses["declined_recompute_cheaper"] == 4
            assert host.nvme.calls["read"] == 0
            host.now += FRESH + 1
            assert len(session.match(keys(range(4)), 5.0, prefill=64 / 0.01).slots) == 4
