"""The terminal's view of a status snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtier.config.units import BYTES

Snapshot = Mapping[str, Any]
STUCK = 10.0
"""Seconds after which a lease or a reservation is shown."""


def render(snapshot: Snapshot, now: float | None = None) -> RenderableType:
    """Draw a snapshot of the fleet.

    Args:
        snapshot: of the controller, with what the state file says.
        now: seconds since the epoch.
    """
    now = time.time() if now is None else now
    parts: list[RenderableType] = [_head(snapshot, now)]
    if snapshot.get("fault"):
        parts.append(Text(snapshot["fault"], style="yellow"))
    for host in snapshot["hosts"]:
        parts += ["", *_host(host, now)]
    return Group(*parts)


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes >= BYTES[unit]:
            return f"{nbytes / BYTES[unit]:.1f} {unit}"
    return f"{nbytes:.0f} B"


def age(seconds: float) -> str:
    """A time span for people."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _head(snapshot: Snapshot, now: float) -> Text:
    ray, redis = snapshot["ray"], snapshot["redis"]
    line = Text.assemble(("kvtier ", "bold"), snapshot.get("version", ""), f"  up {age(now - snapshot['started'])}")
    line.append(f"  Ray {ray['address']}" + (f" (own, pid {ray['pid']})" if ray["own"] else " (yours)"))
    if redis["embedded"]:
        line.append(f"  {redis['version'] or 'Redis'} (pid {redis['pid']})" if redis["pid"] else "  ")
        if not redis["pid"]:
            line.append("Redis is gone: `kvtier up` starts it again", "red")
    if "controller" in snapshot:
        line.append(f"  controller pid {snapshot['controller']['pid']}")
    return line


def _host(host: Snapshot, now: float) -> Iterable[RenderableType]:
    state = _state(host, now)
    pid = f"  pid {host['pid']}" if "pid" in host else ""
    yield Text.assemble((host["host"], "bold"), "  ", state, f"{pid}  {host.get('socket', '')}")
    for fault in (host.get("fault"), host.get("pinning"), (host.get("metrics") or {}).get("fault")):
        if fault:
            yield Text(fault, style="red")
    arena = host.get("arena")
    if arena and arena["ready"] < arena["capacity"]:
        why = f": {arena['fault']}" if arena["fault"] else ""
        yield Text(f"cpu {size(arena['ready'])} of {size(arena['capacity'])} ready{why}", style="yellow")
    hierarchy = host.get("hierarchy")
    if not hierarchy:
        return
    yield _tiers(hierarchy["tiers"], host.get("hands", []), hierarchy["hits"])
    for tier in hierarchy["tiers"]:
        if tier["fault"]:
            yield Text(f"{tier['label']}: {tier['fault']}", style="red")
    yield _traffic(hierarchy)
    if hierarchy["peers"]:
        yield from _peers(hierarchy, host.get("peers"))
    yield _index(hierarchy["index"])
    if hierarchy.get("events"):
        yield _events(hierarchy["events"])
    yield from _remote(host.get("remote"))
    metrics = host.get("metrics")
    if metrics and metrics["url"]:
        yield Text(f"metrics {metrics['url']}")


def _remote(remote: Snapshot | None) -> Iterable[RenderableType]:
    """The door for clients of other hosts, if there is one, and what each tenant has."""
    if not remote:
        return
    how = "TLS" if remote["tls"] else "plain text"
    yield Text(f"remote clients at {remote['address']} ({how})", style="" if remote["tls"] else "yellow")
    yield from (Text(f"remote: {fault}", style="red") for fault in remote["faults"])
    for tenant in remote["tenants"]:
        quota, refused = tenant["quota"], tenant["refused"]
        used = f"cpu {size(tenant['nbytes']['cpu'])}" + (f" of {size(quota['cpu'])}" if quota["cpu"] else "")
        said = f"  {tenant['tenant']}: {tenant['sessions']} sessions, {used}, pinned {size(tenant['pinned_nbytes'])}"
        over = ", ".join(f"{count:,} by {what}" for what, count in refused.items())
        yield Text(said + (f"; over quota: {over}" if over else ""))


def _state(host: Snapshot, now: float) -> tuple[str, str]:
    """In a few words, and their colour."""
    if "gone_since" in host:
        drained = ", drained" if "drained_since" in host else ""
        return f"gone for {age(now - host['gone_since'])}{drained}", "yellow" if drained else "red"
    if "drained_since" in host:
        return f"drained for {age(now - host['drained_since'])} (`kvtier undrain {host['host']}`)", "yellow"
    return ("serving", "green") if host.get("serving") else ("not serving", "red")


def _tiers(tiers: Iterable[Snapshot], hands: Iterable[Snapshot], hits: Mapping[str, int]) -> Table:
    """A row for each tier, and below it one for each of its devices if it has several."""
    table = Table("tier", "used", "of", "", "blocks", "hits", "actor", "state", box=None, pad_edge=False)
    for column in (1, 2, 4, 5):
        table.columns[column].justify = "right"
    pids = {name: hand["pid"] for hand in hands for name in (hand["tier"], hand.get("device"))}
    for tier in tiers:
        table.add_row(*_fill(tier["label"], tier, f"{hits.get(tier['tier'], 0):,}", pids.get(tier["tier"])))
        for device in tier.get("devices", ()):
            table.add_row(*_fill(f"  {device['device']}", device, "", pids.get(device["device"])))
    return table


def _fill(name: str, usage: Snapshot, hits: str, pid: int | None) -> Iterable[str | Text]:
    return (
        name,
        size(usage["used"]),
        size(usage["capacity"]),
        _bar(usage["used"] / max(1, usage["capacity"])),
        f"{usage['blocks']:,}",
        hits,
        f"pid {pid}" if pid else "",
        Text("fault", style="red") if usage["fault"] else Text("ok", style="green"),
    )


def _bar(share: float, width: int = 16) -> Text:
    """A bar that is read right without colours too."""
    filled = min(width, round(share * width))
    return Text("█" * filled + "·" * (width - filled))


def _traffic(status: Snapshot) -> Text:
    asked = sum(status["hits"].values()) + sum(status["misses"].values())
    ratio = f"{status['hit_ratio']:.1%}" if asked else "-"
    line = Text(f"hit ratio {ratio} of {asked:,} blocks asked for, {status['stored']:,} stored")
    line.append(f"\n{status['sessions']} sessions, {status['leases']} leases, {status['reservations']} reservations")
    waiting = {name: count for name, count in status["queues"].items() if count}
    for title, counts in (
        ("moves", status["moves"]),
        ("refused", status["refused"]),
        ("not written to NVMe", status["admission"]["refused"]),
        ("dropped", status["dropped"]),
        ("faults", status["faults"]),
        ("waiting", waiting),
    ):
        if counts:
            line.append(f"\n{title} " + ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    for one in status["held"]:
        line.append_text(_held(one))
    return line


def _peers(hierarchy: Snapshot, server: Snapshot | None) -> Iterable[Text]:
    """What goes to and comes from other hosts, and how each of them fares."""
    lent = f"lent other hosts {hierarchy['lent']:,} blocks, {size(hierarchy['lent_nbytes'])}"
    yield Text(lent + (f", at {server['door']}" if server and server["door"] else ""))
    for fault in (server["fault"] if server else "", hierarchy["peers"]["fault"]):
        if fault:
            yield Text(fault, style="red")
    for one in hierarchy["peers"]["hosts"]:
        pace = f" at {size(one['bytes_per_second'])}/s" if one["bytes_per_second"] else ""
        text = Text(f"peer {one['host']} {one['door']}  {one['blocks']:,} blocks, {size(one['bytes'])} fetched{pace}  ")
        if one["avoided"]:
            yield text.append(f"not asked for {age(one['avoided'])}: {one['fault'] or 'it failed'}", "red")
        else:
            yield text.append(one["fault"] or "ok", "yellow" if one["fault"] else "green")


def _held(one: Snapshot) -> Text:
    """What keeps slots from others; a lease or reservation that is old is stuck, or its engine is."""
    if one["kind"] == "pin":
        return Text(f"\npinned {size(one['nbytes'])} by {one['owner']}, the last for {age(-one['age'])} more")
    stuck = one["age"] > STUCK
    return Text(f"\n{one['kind']} of {size(one['nbytes'])}, {age(one['age'])} old, {one['owner']}") if stuck else Text()


def _index(index: Snapshot) -> Text:
    well = Text("ok", style="green") if index["ok"] else Text(str(index["reason"]), style="red")
    silent = index.get("unanswered", 0)
    notes = f", {silent:,} of {index['lookups']:,} lookups unanswered" if silent else ""
    notes += ", all is to be told anew" if index["needs_publish"] else ""
    told = f"  {index['told']:,} updates told, {index['queued']:,} queued{notes}"
    return Text.assemble(f"index {index['kind']} ", well, told)


def _events(events: Snapshot) -> Text:
    if events["fault"]:
        return Text(events["fault"], style="red")
    lost = f", {events['lost']:,} times too many at once" if events["lost"] else ""
    return Text(f"events {events['endpoint']}  {events['blocks']:,} blocks told, batch {events['last']}{lost}")
