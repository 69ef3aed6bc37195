"""What other hosts have: found, fetched, lent, and never taken for this host's own."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvtier.hierarchy import lending, seeking
from kvtier.hierarchy.answers import GrantState
from kvtier.hierarchy.cache import Limits
from kvtier.hierarchy.sharing import ANSWER, Sharing
from kvtier.tiers.base import TierNumber
from tests.fleet_fixture import Fleet, patiently
from tests.hierarchy_fixture import NBYTES, SLOT_NBYTES, fill, holds, keys, reserve, save, states

PLENTY = Limits(1 << 30, 1 << 30)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    patiently(monkeypatch)


def misses(host):
    return {why: count for why, count in host.stats.misses.items() if count}


class TestFinding:
    def test_what_one_host_saved_is_a_hit_on_another(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(5))
            session = b.session()
            matched = session.match(keys(range(6)), 5.0)
            assert holds(session, matched, range(5))
            assert len(matched.slots) == 5
            assert matched.tiers.tolist() == [TierNumber.PEER] * 5
            assert b.stats.hits == {"peer": 5}
            assert misses(b) == {"absent": 1}
            assert b.told(3) != 0
            assert session.match(keys(range(5)), 0.0).tiers.tolist() == [TierNumber.CPU] * 5
            for host in (a, b):
                host.check()
            assert a.hierarchy.status()["leases"] == 0

    def test_the_part_that_is_here_is_not_looked_up(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(6))
            session = b.session()
            save(session, range(3))
            session.match(keys(range(3)), 5.0)
            assert b.index.status()["lookups"] == 0
            matched = session.match(keys(range(6)), 5.0)
            assert matched.tiers.tolist() == [TierNumber.CPU] * 3 + [TierNumber.PEER] * 3
            assert b.index.status()["lookups"] == 1
            assert b.stats.moves["peer", "cpu"] == 3

    def test_a_host_that_is_alone_looks_nothing_up(self):
        with Fleet() as fleet:
            a = fleet.host("a")
            a.session().match(keys(range(3)), 1.0)
            assert a.index.status()["lookups"] == 0

    def test_without_waiting_it_comes_for_the_next_one(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            session = b.session()
            b.index.gate = threading.Event()
            assert len(session.match(keys(range(3)), 0.0).slots) == 0
            assert misses(b) == {"seeking": 3}
            b.index.gate.set()
            b.settle()
            assert session.match(keys(range(3)), 0.0).tiers.tolist() == [TierNumber.PEER] * 3

    def test_a_stream_is_promised_what_was_found(self):
        """Its first call says how much can be loaded, so it waits for the lookup, and for nothing else."""
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            session = b.session()
            b.peers.gate.clear()
            first = session.match(keys(range(3)), 0.0, stream=True)
            assert (len(first.slots), first.staging) == (0, 3)
            b.peers.gate.set()
            assert len(session.match(keys(range(3)), 5.0, stream=True).slots) == 3

    def test_many_who_ask_cause_one_lookup_and_one_fetch(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(4))
            b.index.gate = threading.Event()
            sessions = [b.session() for _ in range(4)]
            for session in sessions:
                session.match(keys(range(4)), 0.0)
            b.index.gate.set()
            b.settle()
            assert b.index.status()["lookups"] == 1
            assert b.peers.calls["read"] == 1
            assert [len(session.match(keys(range(4)), 0.0).slots) for session in sessions] == [4] * 4
            assert b.stats.moves["peer", "cpu"] == 4

    def test_a_chain_with_a_hole_ends_there(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), [1, 2])
            save(a.session(), [4, 5])
            session = b.session()
            assert len(session.match(keys([1, 2, 3, 4, 5]), 5.0).slots) == 2
            assert b.stats.moves["peer", "cpu"] == 2

    def test_blocks_of_both_lie_in_one_chain(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), [0, 1, 3])
            session = b.session()
            save(session, [2])
            matched = session.match(keys(range(4)), 5.0)
            assert len(matched.slots) == 4
            assert holds(session, matched, range(4))

    def test_an_index_that_does_not_answer_costs_a_miss_with_its_own_name(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            b.index.silent = True
            assert len(b.session().match(keys(range(3)), 5.0).slots) == 0
            assert misses(b) == {"index_unavailable": 3}
            b.check()

    def test_a_lookup_that_hangs_holds_nobody_up(self, monkeypatch):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            monkeypatch.setattr("kvtier.hierarchy.cache.LOOKUP", 0.0)
            b.index.gate = threading.Event()
            session = b.session()
            assert len(session.match(keys(range(3)), 5.0).slots) == 0
            assert misses(b) == {"seeking": 3}
            b.index.gate.set()

    def test_lookups_are_bounded(self, monkeypatch):
        monkeypatch.setattr(seeking, "SEEKS", 2)
        with Fleet() as fleet:
            fleet.host("a")
            b = fleet.host("b")
            b.index.gate = threading.Event()
            session = b.session()
            for seed in range(3):
                session.match(keys([seed]), 0.0)
            assert misses(b) == {"seeking": 2, "index_unavailable": 1}
            assert b.stats.faults["seeks_refused"] == 1
            b.index.gate.set()

    def test_what_costs_more_to_fetch_than_to_compute_is_declined(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(4))
            session = b.session()
            save(session, [0])
            for _ in range(3):
                b.state.pace.observe(TierNumber.PEER, 1 << 20, 100.0, b.now)
            matched = session.match(keys(range(4)), 5.0, prefill=1000.0)
            assert len(matched.slots) == 1
            assert misses(b) == {"declined_recompute_cheaper": 3}
            assert b.peers.calls["read"] == 0
            save(a.session(), range(10, 14))
            assert session.match(keys(range(10, 14)), 5.0, prefill=1000.0).lease == 0, "nor all of a chain"
            assert misses(b) == {"declined_recompute_cheaper": 7}
            assert b.peers.calls["read"] == 0

    def test_prefetch_and_pin_bring_it_and_move_does_not(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b", nvme=4 << 20)
            save(a.session(), range(6))
            session = b.session()
            assert session.move(keys(range(6)), TierNumber.NVME, 10.0) == 0
            assert session.prefetch(keys(range(3)), TierNumber.CPU).result(10.0) == 3
            assert session.pin(keys(range(6)), 60.0) == 6


class TestOnTheWay:
    def test_a_slow_host_does_not_hold_up_the_disk(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b", nvme=4 << 20)
            session = b.session()
            save(session, [1, 2])
            session.move(keys([1, 2]), TierNumber.NVME, 5.0)
            b.peers.gate.clear()
            for chain in range(10, 20):
                save(a.session(), [chain])
                assert session.match(keys([chain]), 0.0, stream=True).staging == 1
            assert session.match(keys([1, 2]), 10.0).tiers.tolist() == [TierNumber.NVME] * 2
            b.peers.gate.set()

    def test_a_stream_gets_what_the_disk_has_while_the_rest_is_on_its_way(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b", nvme=4 << 20)
            save(a.session(), range(8))
            session = b.session()
            save(session, range(4))
            session.move(keys(range(4)), TierNumber.NVME, 5.0)
            b.peers.gate.clear()
            b.nvme.gate.clear()
            assert session.match(keys(range(8)), 0.0, stream=True).staging == 8
            b.nvme.gate.set()
            second = session.match(keys(range(8)), 10.0, stream=True)
            assert (len(second.slots), second.staging) == (4, 4)
            session.release(second.lease)
            b.peers.gate.set()
            third = session.match(keys(range(8)), 10.0, stream=True, after=4)
            assert len(third.slots) == 8
            assert b.stats.hits == {"nvme": 4, "peer": 4}
            assert misses(b) == {}

    def test_hosts_that_hang_take_so_many_flights_and_no_more(self, monkeypatch):
        monkeypatch.setattr("kvtier.hierarchy.staging.PEER_FLIGHTS", 2)
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            session = b.session()
            b.peers.gate.clear()
            for chain in range(3):
                save(a.session(), [chain])
                session.match(keys([chain]), 0.0, stream=True)
            assert misses(b) == {"staging_refused": 1}
            b.peers.gate.set()


class TestDeath:
    def test_a_dead_host_is_a_miss(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            fleet.network.unreachable.add(a.door)
            session = b.session()
            assert len(session.match(keys(range(3)), 5.0).slots) == 0
            assert b.stats.faults["peer_lost"] == 3
            b.check()
            assert b.state.cpu.pool.used == 0

    def test_it_is_not_asked_again_at_once(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            fleet.network.unreachable.add(a.door)
            session = b.session()
            session.match(keys(range(3)), 5.0)
            reads = b.peers.calls["read"]
            fleet.network.unreachable.clear()
            assert len(session.match(keys(range(3)), 5.0).slots) == 0
            assert b.peers.calls["read"] == reads
            b.now += seeking.SHUN
            assert len(session.match(keys(range(3)), 5.0).slots) == 3

    def test_the_other_replica_serves(self):
        with Fleet() as fleet:
            a, b, c = (fleet.host(name) for name in "abc")
            save(a.session(), range(3))
            save(b.session(), range(3))
            fleet.network.unreachable.add(b.door)
            session = c.session()
            matched = session.match(keys(range(3)), 5.0)
            assert holds(session, matched, range(3))
            assert len(matched.slots) == 3

    def test_damaged_bytes_are_a_miss(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            b.peers.corrupt |= set(keys([1]))
            session = b.session()
            assert len(session.match(keys(range(3)), 5.0).slots) == 1
            b.check()

    def test_a_transport_that_raises_is_a_miss(self, monkeypatch):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            monkeypatch.setattr(b.peers, "read", lambda *_: 1 // 0)
            assert len(b.session().match(keys(range(3)), 5.0).slots) == 0
            assert b.state.abroad == {}
            b.check()


class TestRows:
    def test_nothing_of_them_shows(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            session = b.session()
            b.peers.gate.clear()
            session.match(keys(range(3)), 0.0, stream=True)
            assert len(b.state.abroad) == 3
            b.check_rows()
            assert b.hierarchy.inspect(keys([1])) == [None]
            assert b.hierarchy.status()["blocks"] == 0
            assert [tier["tier"] for tier in b.hierarchy.status()["tiers"]] == ["cpu"]
            assert b.hierarchy.evict(keys([1])) == 0
            assert b.hierarchy.clear(bytes(16)) == 0
            b.peers.gate.set()
            b.settle()
            b.check()

    def test_what_is_not_fetched_is_forgotten(self, monkeypatch):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(4))
            session = b.session()
            save(session, [0])
            for _ in range(3):
                b.state.pace.observe(TierNumber.PEER, 1 << 20, 100.0, b.now)
            session.match(keys(range(4)), 5.0, prefill=1000.0)
            b.mover.stager.seeker.sweep()
            assert len(b.state.abroad) == 3
            b.now += seeking.STALE + 1
            b.mover.stager.seeker.sweep()
            assert b.state.abroad == {}
            b.check()

    def test_there_is_a_bound(self, monkeypatch):
        monkeypatch.setattr(seeking, "ABROAD", 2)
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(4))
            session = b.session()
            b.peers.gate.clear()
            assert session.match(keys(range(4)), 0.0, stream=True).staging == 2
            b.peers.gate.set()

    def test_a_save_does_not_wait_for_them(self):
        """Who computed a block stores it, whatever is under way; what arrives then is dropped."""
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            session = b.session()
            b.peers.gate.clear()
            session.match(keys(range(3)), 0.0, stream=True)
            reserved = reserve(session, range(3))
            assert states(reserved) == [GrantState.GRANTED] * 3
            b.peers.gate.set()
            b.settle()
            assert all(session.commit(reserved.ticket, fill(session, reserved, range(3))))
            assert b.stats.stored == 3
            b.check()

    def test_a_block_that_is_being_saved_is_not_looked_up(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            session = b.session()
            reserve(session, range(3))
            session.match(keys(range(3)), 5.0)
            assert b.index.status()["lookups"] == 0

    def test_a_full_host_makes_room_and_keeps_its_capacity(self):
        with Fleet() as fleet:
            a, b = fleet.host("a", limits=PLENTY), fleet.host("b", blocks=8, limits=PLENTY)
            save(a.session(), range(20))
            session = b.session()
            save(session, range(100, 108))
            matched = session.match(keys(range(20)), 5.0)
            assert 0 < len(matched.slots) <= 8
            assert holds(session, matched, range(20))
            b.check()


class TestLending:
    def sizes(self, count):
        return np.full(count, NBYTES, np.int64)

    def test_what_is_lent_stays_and_shows_its_borrower(self):
        with Fleet() as fleet:
            a = fleet.host("a")
            save(a.session(), range(3))
            lender = a.hierarchy.lending
            lent = lender.lend("b", keys([0, 9, 2]), self.sizes(3), 0.0)
            assert (lent.slots.offsets >= 0).tolist() == [True, False, True]
            status = a.hierarchy.status()
            assert status["held"][0]["owner"] == "peer b"
            assert status["sessions"] == 1, "a host is no session"
            assert a.hierarchy.evict(keys(range(3))) == 3
            assert a.state.cpu.pool.used == 2 * SLOT_NBYTES
            lender.give_back(lent)
            lender.give_back(lent)
            assert a.state.cpu.pool.used == 0
            assert a.hierarchy.status()["held"] == []
            assert len(a.state.ledger.sessions) == 1

    def test_another_size_is_not_there(self):
        with Fleet() as fleet:
            a = fleet.host("a")
            save(a.session(), [1])
            lent = a.hierarchy.lending.lend("b", keys([1]), self.sizes(1) + 1, 0.0)
            assert lent.lease == 0

    def test_what_is_on_disk_is_brought_up(self):
        with Fleet() as fleet:
            a = fleet.host("a", nvme=4 << 20)
            session = a.session()
            save(session, range(3))
            session.move(keys(range(3)), TierNumber.NVME, 5.0)
            lent = a.hierarchy.lending.lend("b", keys(range(3)), self.sizes(3), 5.0)
            assert (lent.slots.offsets >= 0).all()
            a.hierarchy.lending.give_back(lent)

    def test_who_does_not_wait_gets_what_is_there(self):
        with Fleet() as fleet:
            a = fleet.host("a", nvme=4 << 20)
            session = a.session()
            save(session, range(3))
            session.move(keys([2]), TierNumber.NVME, 5.0)
            a.nvme.gate.clear()
            lent = a.hierarchy.lending.lend("b", keys(range(3)), self.sizes(3), 0.001)
            assert (lent.slots.offsets >= 0).tolist() == [True, True, False]
            a.hierarchy.lending.give_back(lent)
            a.nvme.gate.set()

    def test_no_more_than_a_part_of_the_tier_is_lent_at_once(self, monkeypatch):
        monkeypatch.setattr(lending, "QUEUE", 0.0)
        with Fleet() as fleet:
            a = fleet.host("a", blocks=40)
            save(a.session(), range(20))
            lender, quota = a.hierarchy.lending, int(0.25 * a.state.cpu.pool.capacity) // SLOT_NBYTES
            first = lender.lend("b", keys(range(quota)), self.sizes(quota), 0.0)
            assert (first.slots.offsets >= 0).all()
            assert lender.lend("c", keys(range(20)), self.sizes(20), 0.0).lease == 0
            assert a.stats.refused["lent_quota"] == 20
            lender.give_back(first)
            alone = lender.lend("c", keys(range(20)), self.sizes(20), 0.0)
            assert (alone.slots.offsets >= 0).all(), "one request is not too large for a small tier"

    def test_who_waits_is_lent_what_another_gives_back(self):
        with Fleet() as fleet:
            a = fleet.host("a", blocks=40)
            save(a.session(), range(20))
            lender = a.hierarchy.lending
            first = lender.lend("b", keys(range(20)), self.sizes(20), 0.0)
            threading.Timer(0.01, lender.give_back, [first]).start()
            assert lender.lend("c", keys(range(3)), self.sizes(3), 10.0).lease

    def test_what_is_only_heard_of_is_not_lent(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), [1])
            b.peers.gate.clear()
            b.session().match(keys([1]), 0.0, stream=True)
            assert b.hierarchy.lending.lend("c", keys([1]), self.sizes(1), 0.0).lease == 0
            b.peers.gate.set()


class TestOffers:
    def offer(self, a, b, seeds):
        node = next(node for node in a.index.nodes() if node.door == b.door)
        return a.peers.offer(node, keys(seeds), [NBYTES] * len(seeds), 0.0)

    def test_who_takes_an_offer_has_the_blocks(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b", blocks=100)
            save(a.session(), range(4))
            assert self.offer(a, b, range(4)) == 4
            b.settle()
            session = b.session()
            assert session.match(keys(range(4)), 0.0).tiers.tolist() == [TierNumber.CPU] * 4
            assert self.offer(a, b, range(4)) == 0, "it has them"
            b.check()

    @pytest.mark.parametrize("why", ["writing", "draining", "busy"])
    def test_it_is_declined_under_pressure(self, why):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(4))
            b.state.relieving, b.state.draining = why == "writing", why == "draining"
            b.hierarchy.lending._taking = lending.TAKEN if why == "busy" else 0
            assert self.offer(a, b, range(4)) == 0
            assert b.stats.offers == {"declined": 4}


class Time:
    """Monotonic seconds that pass while somebody sleeps, and while the other host settles."""

    def __init__(self, *others) -> None:
        self.now, self.others = 0.0, others

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for host in self.others:
            host.settle()


class TestSharing:
    def sharing(self, host, often, *others):
        time = Time(*others)
        return Sharing(host.state, often, time, time.sleep)

    def test_what_is_hit_often_gets_a_second_replica(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b", blocks=200)
            session = a.session()
            save(session, range(8))
            for _ in range(5):
                session.release(session.match(keys(range(3)), 0.0).lease)
            sharing = self.sharing(a, 4)
            assert sharing.replicate() == 3
            b.settle()
            assert [bool(b.tiers_of(seed)) for seed in range(5)] == [True, True, True, False, False]
            assert sharing.replicate() == 0, "others have it"
            assert a.stats.offers == {"made": 3, "accepted": 3}

    def test_what_was_hit_long_ago_gets_none(self):
        with Fleet() as fleet:
            a = fleet.host("a")
            fleet.host("b", blocks=200)
            session = a.session()
            save(session, range(3))
            for _ in range(50):
                session.release(session.match(keys(range(3)), 0.0).lease)
            a.now += 600
            assert self.sharing(a, 4).replicate() == 0

    def test_what_nobody_takes_is_not_offered_at_once_again(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            b.state.relieving = True
            session = a.session()
            save(session, range(3))
            for _ in range(5):
                session.release(session.match(keys(range(3)), 0.0).lease)
            sharing = self.sharing(a, 4)
            assert sharing.replicate() == 0
            calls = a.peers.calls["offer"]
            assert sharing.replicate() == 0
            assert a.peers.calls["offer"] == calls

    def test_ancestors_go_first(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b", blocks=32)
            session = a.session()
            save(session, range(6))
            for _ in range(5):
                session.release(session.match(keys(range(6)), 0.0).lease)
            assert self.sharing(a, 4).replicate() == 2, "a sixteenth of the tier at a time"
            b.settle()
            assert [bool(b.tiers_of(seed)) for seed in range(6)] == [True, True, False, False, False, False]

    def test_a_host_that_goes_hands_all_over_that_others_have_not(self):
        with Fleet() as fleet:
            a, b, c = fleet.host("a"), fleet.host("b", blocks=64), fleet.host("c", blocks=64)
            session = a.session()
            save(session, range(12))
            save(session, range(20, 24))
            save(b.session(), range(20, 24))
            handed = self.sharing(a, 0, b, c).hand_over(30.0)
            assert (handed.offered, handed.taken, handed.handed) == (12, 12, 12)
            assert states(reserve(session, [99])) == [GrantState.REFUSED]
            assert a.stats.refused == {"draining": 1}
            reader = b.session()
            fleet.network.unreachable.add(a.door)
            matched = reader.match(keys(range(12)), 5.0)
            assert len(matched.slots) == 12
            assert holds(reader, matched, range(12))

    def test_its_time_is_bounded(self):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            b.state.relieving = True
            sharing = self.sharing(a, 0, b)
            assert sharing.hand_over(1.0).taken == 0
            assert sharing._clock() < 1.0 + ANSWER

    def test_without_other_hosts_it_is_over_at_once(self):
        with Fleet() as fleet:
            a = fleet.host("a")
            save(a.session(), range(3))
            assert self.sharing(a, 0).hand_over(30.0).handed == 0
