"""How a fleet is judged."""

from __future__ import annotations

import pytest

from kvtier.memory.arena import Arena
from kvtier.testing.session import CAPACITY, host_over
from kvtier_services.monitor.snapshot import SCHEMA, snapshot

NOW = 10_000.0


@pytest.fixture
def host() -> dict:
    """A host that is well, as its process tells it."""
    with host_over(Arena.private(CAPACITY)) as made:
        hierarchy = made.hierarchy.status()
    host = {"host": "a", "serving": True, "fault": "", "pid": 3, "hands": [], "pinning": "", "remote": None}
    host |= {"arena": {"ready": 4, "capacity": 8, "fault": ""}, "peers": None, "metrics": {"url": "u", "fault": ""}}
    return host | {"hierarchy": hierarchy}


def judged(*hosts: dict, **about: object) -> dict:
    return snapshot(about, hosts, taken=NOW)


def test_a_fleet_that_is_well(host):
    found = judged(host, version="1", redis={"embedded": True, "pid": 5, "version": "redis 7"})
    assert (found["schema"], found["taken"], found["version"]) == (SCHEMA, NOW, "1")
    assert (found["health"], found["reasons"]) == ("ok", [])
    assert [(one["health"], one["reasons"]) for one in found["hosts"]] == [("ok", [])]


def _tier(host):
    host["hierarchy"]["tiers"][-1]["fault"] = "disk gone"


def _device(host):
    host["hierarchy"]["tiers"][-1]["devices"] = [{"device": "/mnt/b", "fault": "disk gone"}]


def _hand(host):
    host["hands"] = [{"label": "nvme", "fault": "its process does not answer"}]


def _arena(host):
    host["arena"]["fault"] = "/dev/shm is full"


def _stuck(host):
    host["hierarchy"] |= {"stuck": {"lease": 2, "reservation": 0}, "oldest": {"lease": 90.0, "reservation": 0.0}}


def _index(host):
    host["hierarchy"]["index"] |= {"ok": False, "reason": "timed out."}


def _lag(host):
    host["hierarchy"]["index"]["lag"] = 31.0


def _peer(host):
    one = {"host": "b", "avoided": 3.0, "fault": "nobody answers"}
    host["hierarchy"]["peers"] = {"fault": "", "hosts": [one]}


def _door(host):
    host["peers"] = {"fault": "cannot listen"}


def _remote(host):
    host["remote"] = {"faults": ["tokens.json: broken"]}


def _events(host):
    host["hierarchy"]["events"] = {"fault": "no events: port taken"}


def _metrics(host):
    host["metrics"] = {"url": "", "fault": "no metrics: port taken"}


def _memory(host):
    host["pinning"] = "not page-locked"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_tier, "nvme: disk gone"),
        (_device, "/mnt/b: disk gone"),
        (_hand, "nvme: its process does not answer"),
        (_arena, "cpu: 4 B of 8 B ready: /dev/shm is full"),
        (_stuck, "2 leases of engines that seem to hang, the oldest 1.5 min"),
        (_index, "index: timed out; only its own blocks are found until it answers"),
        (_lag, "index: it was not told of what changed 31 s ago"),
        (_peer, "b is not asked for 3 s: nobody answers"),
        (_door, "other hosts: cannot listen"),
        (_remote, "remote clients: tokens.json: broken"),
        (_events, "no events: port taken"),
        (_metrics, "no metrics: port taken"),
        (_memory, "not page-locked"),
    ],
)
def test_what_is_wrong_with_a_host_that_serves(host, harm, says):
    harm(host)
    found = judged(host)
    assert (found["hosts"][0]["health"], found["hosts"][0]["reasons"]) == ("degraded", [says])
    assert (found["health"], found["reasons"]) == ("degraded", [f"a: {says}"])


def test_hosts_that_do_not_serve(host):
    others = [
        {"host": "b", "serving": False, "gone_since": NOW - 120.0},
        {"host": "c", "serving": False, "drained_since": NOW - 5.0},
        {"host": "d", "serving": False, "fault": "no room in /dev/shm"},
        {"host": "e", "fault": "its process does not answer"},
        {"host": "f", "serving": False},
    ]
    found = judged(host, *others)
    assert found["health"] == "degraded"
    assert {one["host"]: (one["health"], *one["reasons"]) for one in found["hosts"][1:]} == {
        "b": ("down", "gone for 2.0 min"),
        "c": ("drained", "drained for 5 s (`kvtier undrain c`)"),
        "d": ("down", "no room in /dev/shm"),
        "e": ("down", "its process does not answer"),
        "f": ("down", "it does not serve"),
    }
    assert judged(host, others[1])["health"] == "ok", "a host that rests on purpose is no trouble"
    assert judged(*others)["health"] == "down"
    assert judged()["reasons"] == ["no host serves"]


def test_a_host_that_is_being_drained(host):
    host["hierarchy"]["draining"] = True
    assert judged(host)["hosts"][0]["health"] == "drained"


def test_what_is_wrong_with_the_fleet(host):
    gone = judged(host, redis={"embedded": True, "pid": 0, "version": ""}, fault="the controller does not answer")
    assert gone["health"] == "degraded"
    assert gone["reasons"] == ["Redis is gone: `kvtier up` starts it again", "the controller does not answer"]
    assert judged(host, redis={"embedded": False, "pid": 0, "version": ""})["health"] == "ok", "it is the user's"


def test_totals_are_those_of_all_hosts(host):
    one, two = host["hierarchy"], dict(host["hierarchy"])
    one |= {"hits": {"cpu": 3, "nvme": 1}, "misses": {"absent": 4}, "tokens": {"cpu": 192}, "saved_seconds": 1.5}
    one["window"] = {"asked": 8, "hits": {"cpu": 3, "nvme": 1}, "ceiling": 0.5, "distinct": 4}
    two |= {"hits": {"cpu": 2}, "misses": {"quota": 6}, "tokens": {"cpu": 128}}
    del two["window"], two["saved_seconds"]
    found = judged(host, host | {"host": "old", "hierarchy": two}, {"host": "away", "serving": False})["totals"]
    assert found == {
        "asked": 16,
        "hits": {"cpu": 5, "nvme": 1},
        "misses": {"absent": 4, "quota": 6},
        "tokens": {"cpu": 320},
        "hit_ratio": 6 / 16,
        "saved_seconds": 1.5,
        "window": {"asked": 8, "hits": {"cpu": 3, "nvme": 1}},
    }


def test_what_was_told_is_not_changed(host):
    host["hierarchy"]["peers"] = {"fault": "", "hosts": [{"host": "b", "avoided": 0.0, "fault": ""}]}
    found = judged(host, {"host": "b", "serving": False, "gone_since": NOW - 5.0})
    assert found["hosts"][0]["hierarchy"]["peers"]["hosts"][0]["fault"] == "gone for 5 s"
    assert host["hierarchy"]["peers"]["hosts"][0]["fault"] == ""
    assert "health" not in host
