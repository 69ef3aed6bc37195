"""The GPU tier in a process of its own, engines in others: what they read in its memory is right or not read."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.device_child import CHAINS, TOKENS, tokens_of
from tests.shared_fixture import PATIENCE, Host, empty, engine, eventually, host_with, load, opened, promoted


@pytest.fixture
def host() -> Iterator[Host]:
    with host_with("cpu") as host:
        yield host


def test_a_full_hit_is_one_call_to_the_host_and_none_to_the_gpu_tier(host):
    with opened(host) as space:
        kv = promoted(space, 0)
        load(host, space, 0)
        host.arena.memory[:] = 0xA5
        before = dict(host.door.calls)
        for _ in range(5):
            count, tiers, out = load(host, space, 0)
            assert (count, tiers) == (TOKENS, {"gpu": TOKENS})
            assert np.array_equal(out, kv)
        made = {name: n - before.get(name, 0) for name, n in host.door.calls.items() if n > before.get(name, 0)}
        assert made == {"Match": 5}
        assert host.door.calls["Device"] == 1
        assert host.hierarchy.status()["hits"]["gpu"] == 20


def test_a_worker_that_was_killed_is_noticed_and_its_successor_attached(host):
    with opened(host) as space:
        kv = promoted(space, 0)
        load(host, space, 0)
        with space.match(tokens_of(0)) as held:
            assert held.tiers == {"gpu": TOKENS}
            host.restart_worker()
            assert held.load(empty(host)) == 0
        assert load(host, space, 0)[:2] == (TOKENS, {"cpu": TOKENS})
        assert space.prefetch(tokens_of(0), tier="gpu").result(PATIENCE) == 4
        count, tiers, out = load(host, space, 0)
        assert (count, tiers) == (TOKENS, {"gpu": TOKENS})
        assert np.array_equal(out, kv)
        assert host.door.calls["Device"] == 2


def test_while_the_worker_is_away_loads_are_out_of_the_arena(host):
    with opened(host) as space:
        kv = promoted(space, 0)
        load(host, space, 0)
        host.worker.process.send_signal(signal.SIGKILL)
        host.worker.process.wait(10.0)
        host.gpu.usage()
        count, tiers, out = load(host, space, 0)
        assert (count, tiers) == (TOKENS, {"cpu": TOKENS})
        assert np.array_equal(out, kv)


def test_an_engine_that_dies_holding_leases_there_holds_them_no_more(host):
    with opened(host) as space, engine(host, 1) as dying:
        assert eventually(lambda: host.hierarchy.status()["hits"].get("gpu", 0) > 0)
        dying.process.send_signal(signal.SIGKILL)
        dying.process.wait(10.0)
        assert eventually(lambda: host.hierarchy.status()["leases"] == 0)
        for chain in range(CHAINS):
            space.evict(tokens_of(chain))
        assert eventually(lambda: host.gpu.usage().used == 0)


def test_an_engine_that_cannot_open_it_is_served_out_of_the_arena(host):
    with engine(host, 1, "no-memory") as blind, engine(host, 2) as sees:
        assert eventually(lambda: host.hierarchy.status()["hits"].get("gpu", 0) > 20)
        said, other = blind.ends(), sees.ends()
    assert said["wrong"] == other["wrong"] == 0
    assert said["counters"] == {"device_refused": 1}
    assert "gpu" not in said["served"]
    assert said["served"]["cpu"] > 0
    assert "elsewhere is not here" in said["device"]
    assert other["device"] == "attached on cpu"
    assert other["served"]["gpu"] > 0
    assert host.hierarchy.status()["faults"]["device_refused"] == 1


@pytest.mark.slow
def test_evictions_and_killed_workers_under_load_never_give_wrong_bytes(host):
    """12 chains share room for 9 in the GPU tier while two engines load and save all of them."""
    with engine(host, 1) as one, engine(host, 2) as two, opened(host) as space:
        random = np.random.default_rng(0)
        for _ in range(3):
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                chain = int(random.integers(CHAINS))
                space.prefetch(tokens_of(chain), tier="gpu").result(PATIENCE)
                space.evict(tokens_of(int(random.integers(CHAINS))))
            host.restart_worker()
        before = host.hierarchy.status()["hits"]["gpu"]
        assert eventually(lambda: host.hierarchy.status()["hits"]["gpu"] > before + 20)
        ends = [one.ends(), two.ends()]
    for said in ends:
        assert said["wrong"] == 0
        assert said["served"]["gpu"] > 0
        assert said["rounds"] > 50
    assert eventually(lambda: host.hierarchy.status()["leases"] == 0)
