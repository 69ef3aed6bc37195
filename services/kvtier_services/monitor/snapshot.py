"""The status of the whole fleet at one moment. The terminal, the page and `--json` show it; none of them judges.

    schema      1; another number when a field changes its meaning or goes. Fields may be added at any time.
    version     of kvtier
    taken       when, in seconds since the epoch
    started     when `kvtier up` started it
    here        the host that was asked
    run_dir     of that host
    controller  pid, started; missing when it does not answer
    fault       why it does not, or why less than usual is known
    ray         address, own (kvtier started it), pid
    redis       embedded (kvtier started it), pid, version
    index       url
    page        url of the status page, and its fault
    health      "ok"; "degraded", something does not work as it should; "down", no host serves. Hosts that are drained
                do not make it worse
    reasons     why it is not "ok", and which hosts are drained, each with its host
    totals      of all hosts since each one's start: asked, hits and tokens by tier, misses by reason, hit_ratio,
                saved_seconds; window (of the last hour): asked, hits by tier
    hosts       each as `CpuTierActor.status` tells it, with
      health    "ok", "degraded", "down", "drained"
      reasons   why not
      gone_since, drained_since   of those that do not serve

Blocks asked for are hits and misses together, everywhere. The hit ceiling is a host's own (`hierarchy.window.ceiling`):
different blocks of several hosts cannot be added up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtier_services.monitor.words import age, size

SCHEMA = 1
LAG = 30.0
"""Seconds after which what the index was not told is a reason."""
Host = Mapping[str, Any]


def snapshot(about: Mapping[str, Any], hosts: Sequence[Host], *, taken: float | None = None) -> dict[str, Any]:
    """A snapshot, as plain values.

    Args:
        about: everything of it that is not of one host.
        hosts: what each said of itself, or was said of it.
        taken: when; now unless given.
    """
    now = time.time() if taken is None else taken
    judged = [_judged(host, now) for host in hosts]
    away = {host["host"]: host["reasons"][0] for host in judged if host["health"] == "down"}
    judged = [_without(away, host) for host in judged]
    reasons = [*_of_all(about), *(f"{host['host']}: {why}" for host in judged for why in host["reasons"])]
    serving = any(host.get("serving") for host in judged)
    well = not _of_all(about) and all(host["health"] in ("ok", "drained") for host in judged)
    health = "down" if not serving else "ok" if well else "degraded"
    return {
        "schema": SCHEMA,
        "taken": now,
        **about,
        "health": health,
        "reasons": reasons or ([] if serving else ["no host serves"]),
        "totals": _totals([host["hierarchy"] for host in judged if host.get("hierarchy")]),
        "hosts": judged,
    }


def _of_all(about: Mapping[str, Any]) -> list[str]:
    redis = about.get("redis") or {}
    gone = ["Redis is gone: `kvtier up` starts it again"] if redis.get("embedded") and not redis.get("pid") else []
    return gone + ([about["fault"]] if about.get("fault") else [])


def _judged(host: Host, now: float) -> dict[str, Any]:
    if "gone_since" in host:
        return {**host, "health": "down", "reasons": [f"gone for {age(now - host['gone_since'])}"]}
    if "drained_since" in host:
        why = f"drained for {age(now - host['drained_since'])} (`kvtier undrain {host['host']}`)"
        return {**host, "health": "drained", "reasons": [why]}
    if not host.get("serving"):
        return {**host, "health": "down", "reasons": [host.get("fault") or "it does not serve"]}
    reasons = list(dict.fromkeys(faults(host)))
    draining = (host.get("hierarchy") or {}).get("draining")
    if draining:
        reasons.insert(0, "it is being drained")
    return {**host, "health": "drained" if draining else "degraded" if reasons else "ok", "reasons": reasons}


def faults(host: Host) -> Iterator[str]:
    """What is wrong with a host that serves, the worst first."""
    hierarchy = host.get("hierarchy") or {}
    if host.get("fault"):
        yield host["fault"]
    for tier in hierarchy.get("tiers", ()):
        for usage in (tier, *tier.get("devices", ())):
            if usage.get("fault"):
                yield f"{usage.get('device') or tier['label']}: {usage['fault']}"
    for hand in host.get("hands", ()):
        if hand.get("fault"):
            yield f"{hand['label']}: {hand['fault']}"
    arena = host.get("arena") or {}
    if arena.get("fault"):
        yield f"cpu: {size(arena['ready'])} of {size(arena['capacity'])} ready: {arena['fault']}"
    yield from _held(hierarchy)
    yield from _index(hierarchy.get("index") or {})
    yield from _around(host, hierarchy)


def _held(hierarchy: Mapping[str, Any]) -> Iterator[str]:
    for kind, count in (hierarchy.get("stuck") or {}).items():
        if count:
            oldest = (hierarchy.get("oldest") or {}).get(kind, 0.0)
            yield f"{count:,} {kind}{'s' * (count > 1)} of engines that seem to hang, the oldest {age(oldest)}"


def _index(index: Mapping[str, Any]) -> Iterator[str]:
    if index and not index["ok"]:
        yield f"index: {str(index['reason']).rstrip('.')}; only its own blocks are found until it answers"
    elif index.get("lag", 0.0) > LAG:
        yield f"index: it was not told of what changed {age(index['lag'])} ago"


def _around(host: Host, hierarchy: Mapping[str, Any]) -> Iterator[str]:
    """Other hosts, clients and routers, and those who look."""
    peers = hierarchy.get("peers") or {}
    for fault in ((host.get("peers") or {}).get("fault"), peers.get("fault")):
        if fault:
            yield f"other hosts: {fault}"
    for one in peers.get("hosts", ()):
        if one.get("avoided"):
            yield f"{one['host']} is not asked for {age(one['avoided'])}: {one.get('fault') or 'it failed'}"
    for fault in (host.get("remote") or {}).get("faults", ()):
        yield f"remote clients: {fault}"
    for fault in (
        (hierarchy.get("events") or {}).get("fault"),
        (host.get("metrics") or {}).get("fault"),
        host.get("pinning"),
    ):
        if fault:
            yield fault


def _without(away: Mapping[str, str], host: dict[str, Any]) -> dict[str, Any]:
    """A host, to whom those peers that are away are not well."""
    peers = (host.get("hierarchy") or {}).get("peers")
    if not away or not peers:
        return host
    told = [
        {**one, "fault": one.get("fault") or away[one["host"]]} if one["host"] in away else one
        for one in peers["hosts"]
    ]
    return {**host, "hierarchy": {**host["hierarchy"], "peers": {**peers, "hosts": told}}}


def _totals(hierarchies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def summed(*path: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for one in hierarchies:
            found: Mapping[str, Any] = one
            for name in path:
                found = found.get(name) or {}
            total.update(found)
        return dict(total)

    hits, misses = summed("hits"), summed("misses")
    asked = sum(hits.values()) + sum(misses.values())
    return {
        "asked": asked,
        "hits": hits,
        "misses": misses,
        "tokens": summed("tokens"),
        "hit_ratio": sum(hits.values()) / asked if asked else 0.0,
        "saved_seconds": sum(one.get("saved_seconds", 0.0) for one in hierarchies),
        "window": {
            "asked": sum((one.get("window") or {}).get("asked", 0) for one in hierarchies),
            "hits": summed("window", "hits"),
        },
    }
