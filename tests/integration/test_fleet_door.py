"""An engine, through the door of one host, loads what another host's engine computed."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvtier import KVSpec
from kvtier.client.cache import Cache
from kvtier.client.door import DoorSession
from kvtier.memory.arena import Arena
from kvtier.testing.session import eventually
from tests.door_fixture import door_in_thread, folders
from tests.fleet_fixture import Fleet

SPEC = KVSpec(4, 2, 16, "float32")
TOKENS, BLOCKS = 1024, 16
SIZE = 8 << 20


@pytest.fixture
def hosts(monkeypatch):
    """What host a's engine computed, host b, and an engine's space there."""
    monkeypatch.setattr("kvtier_services.gateway.calls.LOOKUP", 10.0)
    kv = np.random.default_rng(1).standard_normal((4, 2, TOKENS, 2, 16), np.float32)
    with folders() as (socket, folder), Fleet() as fleet:
        a = fleet.host("a", arena=Arena.private(SIZE))
        b = fleet.host("b", arena=Arena.own(folder, SIZE))
        with Cache(a.session()) as cache:
            assert cache.keyspace(SPEC, model="m", revision="1").save(range(TOKENS), kv).result(30.0).blocks == BLOCKS
        with door_in_thread(b.hierarchy, socket), Cache(DoorSession(socket, call_timeout=10.0)) as cache:
            yield kv, b, cache.keyspace(SPEC, model="m", revision="1")
        b.hierarchy.close()
        b.arena.close()


def test_it_is_a_hit_that_the_engine_can_count_on(hosts):
    kv, b, space = hosts
    for tier in ("peer", "cpu"):
        out, lookups = np.zeros_like(kv), b.index.status()["lookups"]
        with space.match(range(TOKENS), wait=30.0) as hit:
            assert (hit.tokens, hit.staging) == (TOKENS, 0)
            assert hit.load(out) == TOKENS
            assert hit.tiers == {tier: TOKENS}
        assert np.array_equal(out, kv)
        assert b.index.status()["lookups"] - lookups == (tier == "peer")
    assert b.stats.hits == {"peer": BLOCKS, "cpu": BLOCKS}
    assert b.stats.misses.total() == 0


def test_who_does_not_wait_finds_it_later(hosts):
    kv, _, space = hosts
    with space.match(range(TOKENS)) as hit:
        assert hit.tokens == 0

    def there() -> bool:
        with space.match(range(TOKENS)) as hit:
            return hit.tokens == TOKENS

    assert eventually(there)
    out = np.zeros_like(kv)
    with space.match(range(TOKENS)) as hit:
        assert hit.load(out) == TOKENS
    assert np.array_equal(out, kv)


def test_a_lookup_that_hangs_does_not_hold_the_door(hosts, monkeypatch):
    monkeypatch.setattr("kvtier_services.gateway.calls.LOOKUP", 0.05)
    _, b, space = hosts
    b.index.gate = threading.Event()
    with space.match(range(TOKENS), wait=30.0) as hit:
        assert hit.tokens == 0
    assert b.stats.misses["seeking"] == BLOCKS
    b.index.gate.set()


def test_a_host_that_goes_while_it_gives_is_fewer_tokens(hosts):
    kv, b, space = hosts
    b.peers.corrupt |= set(space.chain(range(TOKENS)).addresses[5:])
    out = np.zeros_like(kv)
    with space.match(range(TOKENS), wait=30.0) as hit:
        loaded = hit.load(out)
    assert loaded == 5 * 64
    assert np.array_equal(out[:, :, :loaded], kv[:, :, :loaded])
