"""What a person sees of a status snapshot."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvtier.memory.arena import Arena
from kvtier.testing.session import CAPACITY, host_over
from kvtier_services.monitor.snapshot import snapshot as snapshot_of
from kvtier_services.monitor.status import render
from kvtier_services.monitor.words import age, size

RAY = {"address": "10.0.0.1:6379", "own": True, "pid": 7}
REDIS = {"embedded": True, "pid": 8, "version": "redis 7.2.1"}


def shown(snapshot: dict, width: int = 160) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    about = {name: value for name, value in snapshot.items() if name != "hosts"}
    with console.file:
        console.print(render(snapshot_of(about, snapshot["hosts"], taken=3600.0)))
    return console.export_text()


@pytest.fixture
def snapshot() -> dict:
    with host_over(Arena.private(CAPACITY)) as host:
        hierarchy = host.hierarchy.status()
    hierarchy |= {"hits": {"cpu": 1234}, "misses": {"absent": 1234}, "hit_ratio": 0.5, "moves": {"cpu>nvme": 3}}
    hierarchy["window"] = {"seconds": 60.0, "asked": 1000, "distinct": 400, "hits": {"cpu": 250}, "ceiling": 0.6}
    hand = {"tier": "nvme", "label": "nvme", "pid": 11, "connected": True, "fault": "", "notes": []}
    host = {"host": "box", "serving": True, "pid": 10, "fault": "", "socket": "/run/door.sock", "hands": [hand]}
    host |= {"hierarchy": hierarchy, "metrics": {"url": "http://127.0.0.1:9400/metrics", "fault": ""}}
    about = {"version": "1.2.3", "started": 0.0, "ray": RAY, "redis": REDIS, "controller": {"pid": 9}, "here": "box"}
    return about | {"page": {"url": "http://127.0.0.1:9401/", "fault": ""}, "hosts": [host]}


def test_a_host_that_is_well(snapshot):
    text = shown(snapshot)
    for part in (
        "kvtier 1.2.3  up 1.0 h  Ray 10.0.0.1:6379 (own, pid 7)  redis 7.2.1 (pid 8)  controller pid 9",
        "page http://127.0.0.1:9401/",
        "\nok\n",
        "box (here)  serving  pid 10  /run/door.sock",
        "4.0 MiB",
        "pid 11",
        "hit ratio 50.0% of 2,468 blocks asked for: cpu 50.0%  last hour 25.0%, at best 60.0%",
        "missed absent 1,234",
        "moves cpu>nvme 3",
        "index local ok",
        "metrics http://127.0.0.1:9400/metrics",
    ):
        assert part in text


def test_what_is_wrong_is_said(snapshot):
    snapshot["fault"] = "the controller does not answer"
    snapshot["redis"] = REDIS | {"pid": 0}
    snapshot["hosts"].append({"host": "other", "fault": "its process does not answer"})
    snapshot["hosts"][0]["hierarchy"]["tiers"][-1]["fault"] = "disk gone"
    text = shown(snapshot)
    for part in ("the controller does not answer", "Redis is gone", "other  not serving", "its process", "disk gone"):
        assert part in text


def test_hosts_that_have_gone_or_are_drained_are_shown(snapshot):
    away = {"address": "10.0.0.3", "serving": False}
    snapshot["hosts"] += [
        away | {"host": "lost", "gone_since": 3000.0},
        away | {"host": "resting", "drained_since": 3590.0},
        away | {"host": "both", "gone_since": 3540.0, "drained_since": 3000.0},
    ]
    text = shown(snapshot)
    for part in (
        "lost  gone for 10.0 min",
        "resting  drained for 10 s (`kvtier undrain resting`)",
        "both  gone for 1.0 min, drained",
        "degraded  1 ok, 2 down, 1 drained",
        "fleet: hit ratio 50.0% of 2,468",
    ):
        assert part in text


def test_an_arena_that_grows_says_how_far_it_is(snapshot):
    arena = snapshot["hosts"][0]["arena"] = {"ready": 12 << 30, "capacity": 64 << 30, "fault": ""}
    assert "cpu is growing: 12.0 GiB of 64.0 GiB so far" in shown(snapshot)
    assert "\nok\n" in shown(snapshot)
    arena["fault"] = "/dev/shm has 1 MiB free"
    assert "cpu: 12.0 GiB of 64.0 GiB ready: /dev/shm has 1 MiB free" in shown(snapshot)
    assert "\ndegraded\n" in shown(snapshot)
    arena |= {"ready": arena["capacity"], "fault": ""}
    assert "growing" not in shown(snapshot)


def test_what_holds_on_too_long_is_shown_with_its_owner(snapshot):
    mib = 1 << 20
    snapshot["hosts"][0]["hierarchy"] |= {
        "held": [
            {"kind": "lease", "owner": "engine pid 5", "age": 90.0, "nbytes": 3 * mib, "stuck": True},
            {"kind": "reservation", "owner": "engine pid 6", "age": 5.0, "nbytes": 7 * mib, "stuck": False},
            {"kind": "pin", "owner": "engine pid 7", "age": -7200.0, "nbytes": 2 * mib, "stuck": False},
        ],
        "queues": {"flights": 4, "moves": 0, "promotions": 2},
        "admission": {"selective": True, "refused": {"first_sight": 12}},
    }
    text = shown(snapshot)
    for part in (
        "lease of 3.0 MiB, 1.5 min old, engine pid 5",
        "pinned 2.0 MiB by engine pid 7, the last for 2.0 h more",
        "waiting flights 4, promotions 2\n",
        "not written to NVMe first_sight 12",
    ):
        assert part in text
    assert "engine pid 6" not in text, "it has only begun"


def test_each_device_of_a_tier_is_shown(snapshot):
    host = snapshot["hosts"][0]
    tier = host["hierarchy"]["tiers"][-1]
    tier["devices"] = [
        {"device": "/mnt/a", "used": 1 << 20, "capacity": 2 << 20, "blocks": 1111, "fault": "", "counters": {}},
        {"device": "/mnt/b", "used": 3 << 30, "capacity": 9 << 30, "blocks": 2222, "fault": "gone", "counters": {}},
    ]
    hand = host["hands"].pop()
    host["hands"] = [
        hand | {"tier": f"nvme-{n}", "device": f"/mnt/{d}", "pid": 20 + n} for n, d in ((1, "a"), (2, "b"))
    ]
    rows = {line.split()[0]: line.split() for line in shown(snapshot).splitlines() if "/mnt/" in line}
    assert rows["/mnt/a"][1:5] == ["1.0", "MiB", "2.0", "MiB"]
    assert rows["/mnt/a"][-4:] == ["1,111", "pid", "21", "ok"]
    assert rows["/mnt/b"][-4:] == ["2,222", "pid", "22", "fault"]


def test_numbers_for_people():
    assert [size(n) for n in (0, 1023, 1024, 3 << 29)] == ["0 B", "1023 B", "1.0 KiB", "1.5 GiB"]
    assert [age(n) for n in (5, 90, 7200, 86400 * 3)] == ["5 s", "1.5 min", "2.0 h", "3.0 d"]


def test_a_host_that_publishes_says_where_or_why_not(snapshot):
    events = {"endpoint": "tcp://127.0.0.1:5557", "last": 1234567, "blocks": 2048, "lost": 0, "fault": ""}
    snapshot["hosts"][0]["hierarchy"]["events"] = events
    assert "events tcp://127.0.0.1:5557  2,048 blocks told, batch 1234567" in shown(snapshot)
    events["fault"] = "no events: cannot listen on tcp://127.0.0.1:5557"
    assert "no events: cannot listen on tcp://127.0.0.1:5557" in shown(snapshot)


PEER = {"host": "far", "door": "10.0.0.2:7071", "blocks": 40, "bytes": 10 << 20, "under_way": 0, "links": 2}


def test_a_peer_that_has_gone_is_not_ok(snapshot):
    host = snapshot["hosts"][0]
    well = PEER | {"bytes_per_second": 0.0, "avoided": 0.0, "fault": ""}
    host["hierarchy"]["peers"] = {"fault": "", "counters": {}, "hosts": [well, well | {"host": "near"}]}
    snapshot["hosts"].append({"host": "far", "serving": False, "gone_since": 3000.0})
    text = shown(snapshot)
    assert "fetched  gone for 10.0 min" in text
    assert "peer near 10.0.0.2:7071  40 blocks, 10.0 MiB fetched  ok" in text


@pytest.mark.parametrize("width", [40, 80, 100])
def test_lines_are_broken_between_phrases(snapshot, width):
    lines = shown(snapshot, width).splitlines()
    assert all(len(line) <= width for line in lines if not line.startswith("metrics"))
    text = "\n".join(lines)
    for part in ("Ray 10.0.0.1:6379 (own, pid 7)", "redis 7.2.1 (pid 8)", "controller pid 9", "last hour 25.0%"):
        assert part in text


def test_other_hosts_are_shown(snapshot):
    host = snapshot["hosts"][0]
    well = PEER | {"bytes_per_second": float(800 << 20), "avoided": 0.0, "fault": ""}
    ill = PEER | {"host": "dead", "bytes_per_second": 0.0, "avoided": 3.0, "fault": "nobody answers"}
    host["hierarchy"] |= {"lent": 7, "lent_nbytes": 3 << 20}
    host["hierarchy"]["peers"] = {"fault": "", "counters": {}, "hosts": [well, ill]}
    host["peers"] = {"door": "10.0.0.1:7071", "fault": "", "served": {}}
    text = shown(snapshot)
    for part in (
        "lent other hosts 7 blocks, 3.0 MiB, at 10.0.0.1:7071",
        "peer far 10.0.0.2:7071  40 blocks, 10.0 MiB fetched at 800.0 MiB/s  ok",
        "peer dead 10.0.0.2:7071  40 blocks, 10.0 MiB fetched  not asked for 3 s: nobody answers",
    ):
        assert part in text


def test_a_host_without_others_does_not_speak_of_them(snapshot):
    assert "other hosts" not in shown(snapshot)


def test_tenants_of_the_remote_door_are_shown_with_their_quotas(snapshot):
    tenant = {
        "tenant": "red",
        "sessions": 2,
        "nbytes": {"cpu": 1 << 30},
        "pinned_nbytes": 1 << 20,
        "refused": {"cpu": 7},
    }
    remote = {"address": "0.0.0.0:7070", "tls": True, "faults": ["tokens.json: broken"], "tenants": []}
    remote["tenants"] = [tenant | {"quota": {"cpu": 2 << 30, "pinned": 0, "requests": 0}}]
    snapshot["hosts"][0]["remote"] = remote
    text = shown(snapshot)
    for part in (
        "remote clients at 0.0.0.0:7070 (TLS)",
        "remote clients: tokens.json: broken",
        "red: 2 sessions, cpu 1.0 GiB of 2.0 GiB, pinned 1.0 MiB; over quota: 7 by cpu",
    ):
        assert part in text
