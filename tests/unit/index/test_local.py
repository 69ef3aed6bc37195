"""What the local index has beyond the kit: numbers for hosts."""

import hashlib

import pytest

from kvtier.index import local
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.index.nodes import preferred_number


def test_a_host_gets_the_number_of_its_name_again_in_a_new_life():
    store = LocalStore()
    first = store.register("alice")
    LocalIndex(store, first)
    second = store.register("alice")
    assert (second.node, second.incarnation) == (first.node, first.incarnation + 1)
    assert store.register("bob").node != first.node


def test_hosts_that_prefer_one_number_get_two(monkeypatch):
    monkeypatch.setattr(local, "preferred_number", lambda _: 65_535)
    store = LocalStore()
    assert [store.register(host).node for host in ("alice", "bob", "alice")] == [65_535, 1, 65_535]


@pytest.mark.parametrize("host", ["alice", "bob", "größe"])
def test_a_number_depends_on_the_name_alone(host):
    digest = hashlib.sha256(host.encode()).digest()
    assert preferred_number(host) == 1 + (digest[0] + 256 * digest[1] + 256**2 * digest[2] + 256**3 * digest[3]) % 65535
