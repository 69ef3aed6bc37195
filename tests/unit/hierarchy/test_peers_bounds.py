"""What other hosts must never cost this one."""

from __future__ import annotations

import threading

import pytest

from kvtier.hierarchy.cache import Limits
from kvtier.tiers.base import TierNumber
from tests.fleet_fixture import Fleet, patiently
from tests.hierarchy_fixture import SLOT_NBYTES, holds, keys, save

PLENTY = Limits(1 << 30, 1 << 30)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    patiently(monkeypatch)


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
