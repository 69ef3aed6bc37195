"""What other hosts must never cost this one."""

from __future__ import annotations

import threading

import pytest

from kvtier.hierarchy import seeking
from kvtier.hierarchy.cache import Limits
from kvtier.tiers.base import TierNumber
from tests.fleet_fixture import Fleet, Index, patiently
from tests.hierarchy_fixture import SLOT_NBYTES, holds, keys, save

PLENTY = Limits(1 << 30, 1 << 30)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    patiently(monkeypatch)


def misses(host):
    return {why: count for why, count in host.stats.misses.items() if count}


def hanging(host, monkeypatch):
    """Let reads from other hosts hang until `host.peers.gate` is set; says when one does."""
    begun, read = threading.Event(), host.peers.read

    def hang(*call):
        begun.set()
        return read(*call)

    host.peers.gate.clear()
    monkeypatch.setattr(host.peers, "read", hang)
    return begun


def test_a_block_that_has_no_room_here_throws_nothing_out():
    """Hosts of a fleet may differ: what is larger than this one's tier is a miss."""
    with Fleet() as fleet:
        a, b = fleet.host("a", blocks=400, limits=PLENTY), fleet.host("b", blocks=8, limits=PLENTY)
        save(a.session(), [1], nbytes=9 * SLOT_NBYTES)
        session = b.session()
        save(session, range(100, 106))
        assert len(session.match(keys([1]), 5.0).slots) == 0
        assert len(session.match(keys(range(100, 106)), 0.0).slots) == 6
        b.check()


def test_a_block_on_disk_does_not_wait_for_a_host_that_hangs(monkeypatch):
    """It was asked of another host, then computed and saved here, and then written down."""
    with Fleet() as fleet:
        a, b = fleet.host("a"), fleet.host("b", nvme=4 << 20)
        save(a.session(), range(3))
        session = b.session()
        begun = hanging(b, monkeypatch)
        session.match(keys(range(3)), 0.0, stream=True)
        assert begun.wait(10.0)
        assert save(session, range(3)) == 3
        assert session.move(keys(range(3)), TierNumber.NVME, 5.0) == 3
        matched = session.match(keys(range(3)), 5.0)
        assert matched.tiers.tolist() == [TierNumber.NVME] * 3
        assert holds(session, matched, range(3))
        b.peers.gate.set()
        b.settle()
        b.check()


@pytest.mark.parametrize("how", ["prefetch", "pin"])
def test_moves_do_not_wait_for_a_host_that_hangs(how):
    with Fleet() as fleet:
        a, b = fleet.host("a"), fleet.host("b", nvme=4 << 20)
        save(a.session(), range(3))
        session = b.session()
        save(session, range(10, 13))
        b.peers.gate.clear()
        if how == "pin":
            coming = b.hierarchy.pin(session._number, keys(range(3)), 60.0)
        else:
            coming = session.prefetch(keys(range(3)), TierNumber.CPU)
        assert session.move(keys(range(10, 13)), TierNumber.NVME, 5.0) == 3
        assert not coming.done()
        b.peers.gate.set()
        assert coming.result(10.0) == 3


def test_what_is_cleared_does_not_come_in_behind(monkeypatch):
    """A fetch that is under way when its keyspace is cleared brings nothing back."""
    with Fleet() as fleet:
        a, b = fleet.host("a"), fleet.host("b")
        save(a.session(), range(3))
        session = b.session()
        begun = hanging(b, monkeypatch)
        session.match(keys(range(3)), 0.0, stream=True)
        assert begun.wait(10.0)
        b.hierarchy.clear(b"\1" * 16)
        b.peers.gate.set()
        b.settle()
        assert b.hierarchy.status()["blocks"] == 0
        b.check()


def test_what_has_no_room_here_is_not_promised():
    with Fleet() as fleet:
        a, b = fleet.host("a", blocks=400, limits=PLENTY), fleet.host("b", blocks=8, limits=PLENTY)
        save(a.session(), [1], nbytes=9 * SLOT_NBYTES)
        assert b.session().match(keys([1]), 0.0, stream=True).staging == 0


class TestLookups:
    """What they cost the index, which all hosts share, and those who wait for them."""

    @pytest.fixture
    def asked(self, monkeypatch):
        """How many keys each lookup was of."""
        asked: list[int] = []
        match = Index.match

        def count(index, keys):
            asked.append(len(keys))
            return match(index, keys)

        monkeypatch.setattr(Index, "match", count)
        return asked

    def test_of_a_long_chain_that_nobody_has_only_the_beginning_is_asked_for(self, asked):
        with Fleet() as fleet:
            fleet.host("a")
            b = fleet.host("b")
            b.session().match(keys(range(3000)), 5.0)
            assert asked == [seeking.FIRST]
            assert misses(b) == {"absent": 3000}

    def test_a_chain_is_asked_for_in_parts_as_far_as_others_have_it(self, asked, monkeypatch):
        monkeypatch.setattr(seeking, "FIRST", 2)
        monkeypatch.setattr(seeking, "MOST", 3)
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(7))
            assert len(b.session().match(keys(range(20)), 5.0).slots) == 7
            assert asked == [2, 3, 3]
            b.check()

    def test_an_index_that_falls_silent_in_the_middle_gives_what_it_said_before(self, asked, monkeypatch):
        monkeypatch.setattr(seeking, "FIRST", 2)
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(5))
            match = Index.match
            monkeypatch.setattr(Index, "match", lambda index, keys: match(index, keys) if len(keys) == 2 else None)
            assert len(b.session().match(keys(range(5)), 5.0).slots) == 2
            assert misses(b) == {"index_unavailable": 3}

    def test_a_slow_index_is_not_asked_at_once_again_for_what_nobody_has(self, asked, monkeypatch):
        """Engines ask for a waiting request again and again, and many for the same beginning."""
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            match = Index.match

            def slow(index, keys):
                b.now += 0.015
                return match(index, keys)

            monkeypatch.setattr(Index, "match", slow)
            session = b.session()
            for _ in range(5):
                assert len(session.match(keys(range(3)), 5.0).slots) == 0
            assert asked == [3]
            assert misses(b) == {"absent": 15}
            save(a.session(), range(3))
            b.now += seeking.ABSENT
            assert len(session.match(keys(range(3)), 5.0).slots) == 3

    def test_what_follows_a_block_that_nobody_has_is_not_looked_up_either(self, asked, monkeypatch):
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(2))
            match = Index.match

            def slow(index, keys):
                b.now += 0.015
                return match(index, keys)

            monkeypatch.setattr(Index, "match", slow)
            session = b.session()
            for _ in range(3):
                assert len(session.match(keys(range(4)), 5.0).slots) == 2
            assert asked == [4]

    def test_a_host_that_is_avoided_is_not_promised(self):
        """Those who ask are told so at once, rather than after they have planned with it."""
        with Fleet() as fleet:
            a, b = fleet.host("a"), fleet.host("b")
            save(a.session(), range(3))
            b.peers.avoided.add(a.door)
            session = b.session()
            first = session.match(keys(range(3)), 0.0, stream=True)
            assert (len(first.slots), first.staging) == (0, 0)
            assert b.peers.calls["read"] == 0
            b.peers.avoided.clear()
            assert len(session.match(keys(range(3)), 5.0).slots) == 3


def test_what_has_expired_by_this_hosts_clock_is_not_fetched_again_and_again():
    with Fleet() as fleet:
        a, b = fleet.host("a"), fleet.host("b")
        save(a.session(), [1])
        b.now = float(1 << 41)
        session = b.session()
        for _ in range(5):
            assert len(session.match(keys([1]), 5.0).slots) == 0
        assert b.peers.calls["read"] == 1
        assert b.hierarchy.status()["blocks"] == 0
