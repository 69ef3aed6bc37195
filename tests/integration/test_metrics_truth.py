"""A scripted day of a whole host: every metric is what was counted outside of it.

What is right is known from four places, none of which the exporter reads: what the engine was answered, what passed at
the edges of the tiers' processes, what these processes, routers and Redis have, and a model of the script.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
import urllib.error
import urllib.request

from kvtier.testing.session import NBYTES, chain, eventually
from kvtier_services.gateway import tokens
from kvtier_services.gateway.tokens import Quota
from tests.fleet_fixture import patiently
from tests.fleet_host import FleetHost
from tests.redis_fixture import redis, server_in_temporary_folder, shared_redis  # noqa: F401
from tests.truth.day import SLOT, Day
from tests.truth.host import Scrape, TruthHost, truth_host
from tests.truth.laws import around, counters, gauges, nothing_yet, times
from tests.truth.script import WAIT, Script


def holding(day: Day) -> Scrape:
    """What somebody holds, and what waits: while that is so."""
    host, script, session = day.host, day.script, day.script.session
    script.save(30_000, 3)
    places = {
        first: session.inspect(chain(first, 2)) for first in (*range(10_000, 10_900, 20), *range(20_000, 20_500, 20))
    }
    down = next(first for first, (one, _) in places.items() if one and one["tiers"] == ["nvme"])
    memory = session.attach("cpu")
    leases = [session.match(chain(30_000, count), 0.0).lease for count in (3, 1)]
    both = [first for first, some in places.items() if all(one and {"gpu", "cpu"} <= {*one["tiers"]} for one in some)]
    for first in both:
        inside = session.match(chain(first, 2), 0.0, device=memory.epoch)
        if inside.inside.all():
            break
        session.release(inside.lease)
    assert inside.inside.all()
    reserved = session.reserve(chain(30_100, 2), [NBYTES] * 2, 0)
    held = host.hierarchy.state.ledger.leases
    number = next(number for number, one in held.items() if len(one.offsets) == 3)
    held[number] = dataclasses.replace(held[number], since=held[number].since - 11.0)
    before = host.scrape().some("kvtier_miss_blocks")
    for edge in host.nvme:
        edge.gate.clear()
    try:
        session.match(chain(down, 1), 0.0)
        s = host.scrape()
    finally:
        for edge in host.nvme:
            edge.gate.set()
    session.commit(reserved.ticket, [])
    for lease in (*leases, inside.lease):
        session.release(lease)
    script.settle()
    assert s.one("kvtier_leases") == 3
    assert s.one("kvtier_reservations") == 1
    assert s.some("kvtier_leased_bytes") == {"cpu": 4 * SLOT, "gpu": 2 * SLOT}
    assert s.some("kvtier_stuck") == {"lease": 1}
    oldest = s.some("kvtier_oldest_seconds")
    assert 11.0 <= oldest["lease"] < 30.0
    assert 0 <= oldest.get("reservation", 0) < 10.0
    assert s.one("kvtier_staging_blocks") == 1
    assert s.some("kvtier_queue") == {"flights": 1}
    assert s.some("kvtier_miss_blocks")["staging"] == 1 + before.get("staging", 0)
    return s


def leaving(day: Day, other: FleetHost) -> Scrape:
    """The host is emptied; another one takes what it wants of it."""
    host = day.host
    assert ready(host) == (200, "ok\n")
    assert eventually(lambda: any(node.host == "c" for node in host.hierarchy.state.index.nodes()))
    done = host.loop.run(host.actor.drain(7.0))
    reserved = day.script.session.reserve(chain(40_000, 3), [NBYTES] * 3, 0)
    assert reserved.reason == "draining"
    s = host.scrape()
    offers = s.some("kvtier_offers")
    taken = other.hierarchy.state.stats.offers["taken"]
    assert offers["accepted"] == done["taken"] == taken > 0
    assert offers["made"] >= done["offered"] >= taken
    assert s.one("kvtier_draining") == 1
    assert s.some("kvtier_refused_blocks")["draining"] == 3
    assert ready(host) == (503, "the host is being emptied: it takes no saves\n")
    return s


def ready(host: TruthHost) -> tuple[int, str]:
    """What Kubernetes hears."""
    try:
        with urllib.request.urlopen(host.url.replace("/metrics", "/ready"), timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def test_a_scripted_day(redis, shared_redis, tmp_path, monkeypatch):  # noqa: F811
    patiently(monkeypatch)
    monkeypatch.setattr("kvtier_services.gateway.calls.LOOKUP", 10.0)
    monkeypatch.setenv("KVTIER_HOST", "a")
    red = tokens.add(tmp_path / "tokens.json", "red", quota=Quota(cpu=150_000))
    with truth_host(tmp_path, shared_redis) as host:
        monkeypatch.setenv("KVTIER_HOST", "b")
        server = shared_redis.address.url, shared_redis.address.password_file
        day = Day(host, red, FleetHost(*server, 60, NBYTES))
        try:
            nothing_yet(day.before)
            for part in (day.morning, day.peers, day.noon, day.clients, day.afternoon):
                part()
            assert host.hierarchy.state.index.flush(WAIT)
            day.follower.hear()
            commands = redis.info("commandstats")
            s = host.scrape()
            counters(day, s)
            times(day, s)
            gauges(day, s)
            around(day, s, sum(one["calls"] for one in commands.values()))
            seen = s.seen | holding(day).seen
            monkeypatch.setenv("KVTIER_HOST", "c")
            with contextlib.closing(FleetHost(*server, 60, NBYTES)) as other:
                seen |= leaving(day, other).seen
            assert seen == set(s.families), "every metric is compared with something, and every one of them is there"
        finally:
            day.close()
            day.far.close()


def test_an_index_that_is_away(tmp_path, monkeypatch):
    """How late it is, and how much it was not told, while its server does not answer; and that it is told then."""
    monkeypatch.setenv("KVTIER_HOST", "a")
    with server_in_temporary_folder() as (server, _), truth_host(tmp_path, server) as host:
        script = Script(host)
        try:
            script.save(0, 2)
            assert host.hierarchy.state.index.flush(WAIT)
            known = host.scrape().one("kvtier_index_updates")
            os.kill(server.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                script.save(100, 5)
                host.hierarchy.state.index.match(chain(0, 1))
                assert eventually(lambda: host.scrape().one("kvtier_index_up") == 0)
                s = host.scrape()
                assert s.one("kvtier_index_queued_updates") == 5
                assert 0 < s.one("kvtier_index_lag_seconds") <= time.monotonic() - began
                later = host.scrape().one("kvtier_index_lag_seconds")
                assert later > s.one("kvtier_index_lag_seconds")
            finally:
                os.kill(server.pid, signal.SIGCONT)
            assert eventually(lambda: host.scrape().one("kvtier_index_up") == 1)
            assert eventually(lambda: host.scrape().one("kvtier_index_queued_updates") == 0)
            s = host.scrape()
            assert s.one("kvtier_index_lag_seconds") == 0
            assert s.one("kvtier_index_updates") >= known + 5
        finally:
            script.session.close()
