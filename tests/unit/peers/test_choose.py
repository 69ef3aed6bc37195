"""Blocks are asked for where they will be here first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import OverQuota
from kvtier.index.base import Node, Replica
from kvtier.peers import book
from kvtier.peers.book import Book
from kvtier.peers.choose import DEEP, Route, Want, choose, cut
from kvtier.peers.peer import FRESH, LONGEST_PAUSE, PAUSE, TRIAL, Peer
from kvtier.peers.server import WINDOW_BLOCKS, WINDOW_NBYTES, windows
from kvtier.peers.wire import ITEMS_LIMIT
from kvtier.testing.payloads import key_of
from kvtier.tiers.base import TierNumber

NBYTES = 1 << 20


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def peer_of(clock, name="a", pace=0.0) -> Peer:
    peer = Peer(name, f"{name}:1", None, most=2, clock=clock)
    if pace:
        peer.came(1, NBYTES, NBYTES / pace)
    return peer


def wants_of(count, *routes, nbytes=NBYTES):
    return [Want(place, key_of(place), memoryview(bytes(nbytes)), routes) for place in range(count)]


def shares(wants):
    return {peer.host: len(share) for peer, share in choose(wants)}


def test_equals_share_alike(clock):
    a, b = peer_of(clock, "a", 1e9), peer_of(clock, "b", 1e9)
    assert shares(wants_of(10, Route(a, False, NBYTES), Route(b, False, NBYTES))) == {"a": 5, "b": 5}


def test_the_faster_one_carries_more(clock):
    """Three times as fast: 9 of 12 blocks take as long there as 3 at the other."""
    a, b = peer_of(clock, "a", 3e9), peer_of(clock, "b", 1e9)
    assert shares(wants_of(12, Route(b, False, NBYTES), Route(a, False, NBYTES))) == {"a": 9, "b": 3}


def test_what_is_under_way_counts(clock):
    a, b = peer_of(clock, "a", 1e9), peer_of(clock, "b", 1e9)
    with a.carrying(4 * NBYTES):
        assert shares(wants_of(4, Route(a, False, NBYTES), Route(b, False, NBYTES))) == {"b": 4}
    assert a.under_way == 0


def test_memory_is_asked_before_disk(clock):
    a, b = peer_of(clock, "a"), peer_of(clock, "b")
    few = int(DEEP) - 1
    assert shares(wants_of(few, Route(a, True, NBYTES), Route(b, False, NBYTES))) == {"b": few}


def test_who_was_never_asked_is_taken_for_as_fast_as_the_fastest(clock):
    a, b = peer_of(clock, "a", 1e9), peer_of(clock, "b")
    assert shares(wants_of(10, Route(a, False, NBYTES), Route(b, False, NBYTES))) == {"a": 5, "b": 5}


def test_who_was_slow_gets_another_chance(clock):
    a, b = peer_of(clock, "a", 1e9), peer_of(clock, "b", 1e6)
    routes = Route(a, False, NBYTES), Route(b, False, NBYTES)
    assert shares(wants_of(10, *routes)) == {"a": 10}
    clock.now += FRESH + 1
    a.came(1, NBYTES, NBYTES / 1e9)
    assert shares(wants_of(10, *routes)) == {"a": 5, "b": 5}


def test_who_failed_is_avoided_longer_each_time(clock):
    a = peer_of(clock)
    wants = wants_of(1, Route(a, False, NBYTES))
    for pause in (PAUSE, 2 * PAUSE, 4 * PAUSE):
        a.failed("it hangs")
        assert shares(wants) == {}
        assert a.status().avoided == pytest.approx(pause)
        clock.now += pause - 0.01
        assert shares(wants) == {}
        clock.now += 0.02
        assert shares(wants) == {"a": 1}
    for _ in range(20):
        clock.now += LONGEST_PAUSE
        a.failed("it hangs")
    assert a.status().avoided == LONGEST_PAUSE
    a.succeeded()
    assert shares(wants) == {"a": 1}
    assert a.status().fault == ""


def test_who_failed_is_tried_out_by_one_fetch_at_a_time(clock):
    """A host that still hangs must not hold up all who fetch whenever its pause is over."""
    a, b = peer_of(clock, "a"), peer_of(clock, "b", 1.0)
    wants = wants_of(1, Route(a, False, NBYTES), Route(b, False, NBYTES))
    a.failed("it hangs")
    clock.now += PAUSE
    assert [shares(wants) for _ in range(3)] == [{"a": 1}, {"b": 1}, {"b": 1}]
    clock.now += TRIAL
    assert shares(wants) == {"a": 1}, "that one may have asked for nothing after all"
    a.succeeded()
    assert [shares(wants) for _ in range(2)] == [{"a": 1}] * 2


def test_with_all_links_in_use_nobody_waits_longer_than_the_deadline(clock):
    peer = Peer("a", "a:1", None, most=0, clock=clock)
    with pytest.raises(OverQuota, match="in use"), peer.link(clock.now - 1):
        pass


@given(st.lists(st.integers(1, 5 * NBYTES), min_size=1, max_size=60), st.integers(1, 4))
def test_a_share_is_cut_without_losing_any(sizes, streams):
    peer = peer_of(Clock())
    share = [(Want(place, b"", memoryview(bytes(size)), ()), False) for place, size in enumerate(sizes)]
    parts = list(cut(peer, share, streams=streams, least=8 * NBYTES))
    assert [want.place for part in parts for want in part.wants] == list(range(len(sizes)))
    assert 1 <= len(parts) <= max(1, min(streams, sum(sizes) // (8 * NBYTES)))


def test_no_part_is_larger_than_a_request(clock):
    share = [(want, False) for want in wants_of(ITEMS_LIMIT + 1, nbytes=1)]
    assert [len(part.wants) for part in cut(peer_of(clock), share, streams=1, least=1)] == [ITEMS_LIMIT, 1]


@given(st.lists(st.integers(0, WINDOW_NBYTES * 2), max_size=40), st.booleans())
def test_windows_lose_no_block_and_hold_little(sizes, small):
    nbytes = np.array([1] * (WINDOW_BLOCKS + 3) if small else sizes, np.int64)
    cuts = list(windows(nbytes))
    assert [place for begin, end in cuts for place in range(begin, end)] == list(range(len(nbytes)))
    for begin, end in cuts:
        assert end - begin == 1 or (nbytes[begin:end].sum() <= WINDOW_NBYTES and end - begin <= WINDOW_BLOCKS)


class TestBook:
    @pytest.fixture
    def noted(self, clock) -> Book:
        return Book(lambda node: Peer(node.host, node.door, None, most=2, clock=clock))

    def node(self, number, incarnation=1, door="10.0.0.1:7", *, alive=True) -> Node:
        return Node(number, incarnation, f"h{number}", door, 0.0, alive)

    def note(self, noted, key, node, incarnation=1, tier=TierNumber.CPU):
        noted.note([key], [(Replica(node.node, incarnation, tier, 5000),)], {node.node: node})
        return noted.routes([key])[0]

    def test_says_who_has_a_block_and_how_deep(self, noted):
        for tier, deep in ((TierNumber.CPU, False), (TierNumber.NVME, True), (TierNumber.GPU, True)):
            (route,) = self.note(noted, b"k", self.node(2), tier=tier)
            assert (route.peer.host, route.deep, route.nbytes) == ("h2", deep, 5000)

    def test_the_dead_the_reborn_and_those_without_a_door_are_no_way(self, noted):
        assert self.note(noted, b"a", self.node(2, alive=False)) == ()
        assert self.note(noted, b"b", self.node(2, door="")) == ()
        assert self.note(noted, b"c", self.node(2, incarnation=2), incarnation=1) == ()

    def test_a_host_is_one_peer_in_each_of_its_lives(self, noted):
        first = noted.peer(self.node(2))
        assert noted.peer(self.node(2)) is first
        second = noted.peer(self.node(2, incarnation=2))
        assert second is not first
        assert noted.peers() == [second]

    def test_routes_and_peers_are_bounded(self, noted, monkeypatch):
        monkeypatch.setattr(book, "ROUTES", 10)
        monkeypatch.setattr(book, "PEERS", 3)
        for number in range(1, 30):
            self.note(noted, key_of(number), self.node(number))
        assert len(noted) == 10
        assert [bool(noted.routes([key_of(number)])[0]) for number in (19, 20, 29)] == [False, True, True]
        assert [peer.host for peer in noted.peers()] == ["h27", "h28", "h29"]
