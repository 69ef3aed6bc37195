"""The terminal's view of a status snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtier_services.monitor.words import age, size

Snapshot = Mapping[str, Any]
COLOURS = {"ok": "green", "degraded": "yellow", "down": "red", "drained": "yellow"}
SHOWN = {"ok": "serving", "degraded": "serving, but", "down": "not serving", "drained": "drained"}


class Phrases:
    """Phrases in a row, which lines are broken between and not within."""

    def __init__(self, *phrases: tuple[str, str]) -> None:
        """Each with its style; empty ones are left out."""
        self._phrases = [(text, style) for text, style in phrases if text]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text(overflow="fold")
        for text, style in self._phrases:
            if line and len(line) + 2 + len(text) > options.max_width:
                yield line
                line = Text(overflow="fold")
            line.append("  " if line else "").append(text, style)
        yield line


def render(snapshot: Snapshot, now: float | None = None) -> RenderableType:
    """Draw a snapshot of the fleet; see `kvtier_services.monitor.snapshot`.

    Args:
        snapshot: it.
        now: seconds since the epoch; when it was taken, unless given.
    """
    now = snapshot.get("taken", time.time()) if now is None else now
    parts: list[RenderableType] = [_head(snapshot, now), _health(snapshot)]
    for host in snapshot["hosts"]:
        parts += ["", *_host(host, now, here=host["host"] == snapshot.get("here"))]
    return Group(*parts)


def _head(snapshot: Snapshot, now: float) -> Phrases:
    ray, redis = snapshot["ray"], snapshot["redis"]
    whose = (f" (own, pid {ray['pid']})" if ray["own"] else " (yours)") if ray["address"] else ""
    controller, page = snapshot.get("controller") or {}, snapshot.get("page") or {}
    server = f"{redis['version'] or 'Redis'} (pid {redis['pid']})" if redis["embedded"] and redis["pid"] else ""
    return Phrases(
        (f"kvtier {snapshot.get('version', '')}", "bold"),
        (f"up {age(now - snapshot['started'])}" if "started" in snapshot else "", ""),
        (f"Ray {ray['address']}{whose}" if ray["address"] else "", ""),
        (server, ""),
        (f"controller pid {controller['pid']}" if controller else "", ""),
        (f"page {page['url']}" if page.get("url") else "", ""),
        (page.get("fault", ""), "yellow"),
    )


def _health(snapshot: Snapshot) -> RenderableType:
    """All hosts in one line, and what is wrong with the fleet; what is wrong with a host stands there."""
    hosts, health = snapshot["hosts"], snapshot["health"]
    of_hosts = {f"{host['host']}: {why}" for host in hosts for why in host["reasons"]}
    counts = {name: sum(host["health"] == name for host in hosts) for name in COLOURS}
    several = ", ".join(f"{count} {name}" for name, count in counts.items() if count) if len(hosts) > 1 else ""
    lines: list[RenderableType] = [Phrases((health, f"bold {COLOURS[health]}"), (several, ""))]
    lines += [Text(why, style=COLOURS[health]) for why in snapshot["reasons"] if why not in of_hosts]
    if len(hosts) > 1:
        lines.append(_ratio("fleet: ", snapshot["totals"], {}))
    return Group(*lines)


def _ratio(name: str, counts: Snapshot, window: Snapshot) -> Phrases:
    """What became of the blocks asked for; beside it how much at most could have been hits in the last hour."""
    hits, misses = counts["hits"], counts["misses"]
    asked = sum(hits.values()) + sum(misses.values())
    ratio = f"{sum(hits.values()) / asked:.1%}" if asked else "-"
    tiers = ", ".join(f"{tier} {blocks / asked:.1%}" for tier, blocks in hits.items() if blocks)
    last, best = (window.get("asked") or 0), window.get("ceiling", 0.0)
    recent = sum((window.get("hits") or {}).values())
    return Phrases(
        (f"{name}hit ratio {ratio} of {asked:,} blocks asked for" + (f": {tiers}" if tiers else ""), ""),
        (f"last hour {recent / last:.1%}, at best {best:.1%}" if last else "", ""),
    )


def _host(host: Snapshot, now: float, *, here: bool) -> Iterable[RenderableType]:
    colour, reasons = COLOURS[host["health"]], list(host["reasons"])
    away = "gone_since" in host or "drained_since" in host
    state = ", ".join(reasons) if away else SHOWN[host["health"]]
    if "gone_since" in host and "drained_since" in host:
        state += ", drained"
    yield Phrases(
        (host["host"] + (" (here)" if here else ""), "bold"),
        (state, colour),
        (f"pid {host['pid']}" if "pid" in host else "", ""),
        (host.get("socket", ""), ""),
    )
    yield from (Text(f"  {why}", style=colour) for why in reasons if not away)
    hierarchy = host.get("hierarchy")
    if not hierarchy:
        return
    yield _tiers(hierarchy["tiers"], host.get("hands", []), hierarchy["hits"])
    arena = host.get("arena")
    if arena and arena["ready"] < arena["capacity"] and not arena["fault"]:
        yield Text(f"cpu is growing: {size(arena['ready'])} of {size(arena['capacity'])} so far")
    yield _ratio("", hierarchy, hierarchy.get("window") or {})
    yield _traffic(hierarchy)
    if hierarchy["peers"]:
        yield from _peers(hierarchy, host.get("peers"))
    yield _index(hierarchy["index"])
    if hierarchy.get("events") and not hierarchy["events"]["fault"]:
        yield _events(hierarchy["events"])
    yield from _remote(host.get("remote"))
    metrics = host.get("metrics")
    if metrics and metrics["url"]:
        yield Text(f"metrics {metrics['url']}", no_wrap=True, overflow="ignore")


def _remote(remote: Snapshot | None) -> Iterable[RenderableType]:
    """The door for clients of other hosts, if there is one, and what each tenant has."""
    if not remote:
        return
    how = "TLS" if remote["tls"] else "plain text"
    yield Text(f"remote clients at {remote['address']} ({how})", style="" if remote["tls"] else "yellow")
    for tenant in remote["tenants"]:
        quota, refused = tenant["quota"], tenant["refused"]
        used = f"cpu {size(tenant['nbytes']['cpu'])}" + (f" of {size(quota['cpu'])}" if quota["cpu"] else "")
        said = f"  {tenant['tenant']}: {tenant['sessions']} sessions, {used}, pinned {size(tenant['pinned_nbytes'])}"
        over = ", ".join(f"{count:,} by {what}" for what, count in refused.items())
        yield Text(said + (f"; over quota: {over}" if over else ""))


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
    line = Text(f"{status['stored']:,} blocks stored, {status['sessions']} sessions, {status['leases']} leases, ")
    line.append(f"{status['reservations']} reservations")
    for title, named in (
        ("missed", status["misses"]),
        ("moves", status["moves"]),
        ("refused", status["refused"]),
        ("not written to NVMe", status["admission"]["refused"]),
        ("dropped", status["dropped"]),
        ("faults", status["faults"]),
        ("waiting", status["queues"]),
    ):
        if counts := {name: count for name, count in named.items() if count}:
            line.append(f"\n{title} " + ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    for one in status["held"]:
        line.append_text(_held(one))
    return line


def _peers(hierarchy: Snapshot, server: Snapshot | None) -> Iterable[Text]:
    """What goes to and comes from other hosts, and how each of them fares."""
    lent = f"lent other hosts {hierarchy['lent']:,} blocks, {size(hierarchy['lent_nbytes'])}"
    yield Text(lent + (f", at {server['door']}" if server and server["door"] else ""))
    for one in hierarchy["peers"]["hosts"]:
        pace = f" at {size(one['bytes_per_second'])}/s" if one["bytes_per_second"] else ""
        text = Text(f"peer {one['host']} {one['door']}  {one['blocks']:,} blocks, {size(one['bytes'])} fetched{pace}  ")
        if one["avoided"]:
            yield text.append(f"not asked for {age(one['avoided'])}: {one['fault'] or 'it failed'}", "red")
        else:
            yield text.append(one["fault"] or "ok", "yellow" if one["fault"] else "green")


def _held(one: Snapshot) -> Text:
    """What keeps slots from others: pins, and what is stuck."""
    if one["kind"] == "pin":
        return Text(f"\npinned {size(one['nbytes'])} by {one['owner']}, the last for {age(-one['age'])} more")
    said = f"\n{one['kind']} of {size(one['nbytes'])}, {age(one['age'])} old, {one['owner']}"
    return Text(said if one["stuck"] else "")


def _index(index: Snapshot) -> Text:
    well = Text("ok", style="green") if index["ok"] else Text(str(index["reason"]), style="red")
    silent = index.get("unanswered", 0)
    notes = f", {silent:,} of {index['lookups']:,} lookups unanswered" if silent else ""
    notes += ", all is to be told anew" if index["needs_publish"] else ""
    told = f"  {index['told']:,} updates told, {index['queued']:,} queued{notes}"
    return Text.assemble(f"index {index['kind']} ", well, told)


def _events(events: Snapshot) -> Text:
    lost = f", {events['lost']:,} times too many at once" if events["lost"] else ""
    return Text(f"events {events['endpoint']}  {events['blocks']:,} blocks told, batch {events['last']}{lost}")
