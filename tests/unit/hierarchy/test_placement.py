"""Which host holds the longest prefix: this host's table, and one lookup for all others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.hierarchy import placement
from kvtier.hierarchy.answers import Place
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.tiers.base import TierNumber
from tests.hierarchy_fixture import Host, keys, save


class Fleet:
    """This host among others that share its index."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.store: LocalStore = host.index._store

    def other(self, name: str, seeds: Sequence[int], tier: TierNumber = TierNumber.CPU) -> LocalIndex:
        index = LocalIndex(self.store, self.store.register(name))
        index.add(keys(seeds), tier, [100] * len(seeds))
        return index

    def where(self, seeds: Sequence[int]) -> list[tuple[str, int, dict[str, int]]]:
        return [(p.host, p.blocks, p.tiers) for p in self.host.hierarchy.where(keys(seeds)).places]


@pytest.fixture
def fleet():
    with Host() as host:
        yield Fleet(host)


def test_a_host_alone_answers_from_its_table(fleet):
    save(fleet.host.session(), range(3))
    lookups = fleet.host.index.status()["lookups"]
    assert fleet.host.hierarchy.where(keys(range(5))).places == (Place("test", True, 3, {"cpu": 3}),)
    assert fleet.host.index.status()["lookups"] == lookups


def test_the_longest_prefix_comes_first_and_this_host_at_equal_length(fleet):
    save(fleet.host.session(), range(2))
    fleet.other("long", range(5), TierNumber.NVME)
    fleet.other("alike", range(2))
    fleet.other("hole", [0, 2, 3])
    fleet.other("nothing", [1, 2, 3])
    assert fleet.where(range(6)) == [
        ("long", 5, {"nvme": 5}),
        ("test", 2, {"cpu": 2}),
        ("alike", 2, {"cpu": 2}),
        ("hole", 1, {"cpu": 1}),
    ]


def test_one_lookup_for_all_of_them(fleet):
    fleet.other("one", range(5))
    fleet.other("two", range(5))
    before = fleet.host.index.status()["lookups"]
    fleet.where(range(5))
    assert fleet.host.index.status()["lookups"] == before + 1


def test_an_index_that_does_not_answer_leaves_this_host(fleet, monkeypatch):
    save(fleet.host.session(), range(2))
    fleet.other("long", range(5))
    monkeypatch.setattr(fleet.host.index, "match", lambda _keys: None)
    placement = fleet.host.hierarchy.where(keys(range(5)))
    assert ([place.host for place in placement.places], placement.complete) == (["test"], False)


def test_what_has_expired_is_nowhere(fleet):
    save(fleet.host.session(), range(3))
    table = fleet.host.state.table
    with fleet.host.state.lock:
        table.expires[table.rows[keys([1])[0]]] = 900
        table.soonest = 900.0
    assert fleet.where(range(3)) == [("test", 1, {"cpu": 1})]


def test_blocks_that_only_other_hosts_have_are_not_this_hosts(fleet):
    save(fleet.host.session(), range(2))
    state = fleet.host.state
    with state.lock:
        state.enter([state.learn(keys([2])[0], 100)], TierNumber.PEER)
    assert fleet.where(range(3)) == [("test", 2, {"cpu": 2})]


def test_a_long_chain_is_asked_for_in_parts_as_far_as_others_have_it(fleet, monkeypatch):
    """A lookup of everything at once would be late whatever the index does."""
    monkeypatch.setattr(placement, "MOST", 3)
    fleet.other("one", range(7))
    lookups = fleet.host.index.status()["lookups"]
    assert fleet.where(range(100)) == [("one", 7, {"cpu": 7})]
    assert fleet.host.index.status()["lookups"] == lookups + 3
