"""Metrics of what lies around a host: other hosts, the index, routers, and tenants."""

from __future__ import annotations

from collections.abc import Callable

from kvtier_services.monitor.metrics.described import Described, Status, Values, alone, one, several

PEER_EVENTS = ("fetched", "absent", "corrupt", "late", "unreachable", "refused", "avoided", "bytes")
OFFERS = ("made", "accepted", "taken", "declined")
MENDED = ("missing", "wrong", "stale")
OVER = ("cpu", "requests", "calls", "sessions", "keyspaces")


def _per_peer(read: Callable[[Status], float]) -> Callable[[Status], Values | None]:
    return lambda status: (
        {(peer["host"],): read(peer) for peer in status["peers"]["hosts"]} if status["peers"] else None
    )


def _with_peers(read: Callable[[Status], Values]) -> Callable[[Status], Values | None]:
    return lambda status: read(status) if status["peers"] else None


def _per_tenant(read: Callable[[Status], float]) -> Callable[[Status], Values]:
    return lambda status: {(tenant["tenant"],): read(tenant) for tenant in status["tenants"]}


def _mended(status: Status) -> Values | None:
    counts = status["index"].get("reconciled")
    return None if counts is None else {(what,): counts.get(what, 0) for what in MENDED}


PEERS = (
    Described(
        "kvtier_peer_up",
        "gauge",
        "Whether another host is asked: 0 while it is avoided because it failed.",
        _per_peer(lambda peer: 0 if peer["avoided"] else 1),
        ("peer",),
    ),
    Described(
        "kvtier_peer_bytes_per_second",
        "gauge",
        "How fast blocks come from another host on one connection; 0 when none came of late.",
        _per_peer(lambda peer: peer["bytes_per_second"]),
        ("peer",),
    ),
    Described(
        "kvtier_peer_fetched_blocks",
        "counter",
        "Blocks fetched from another host.",
        _per_peer(lambda peer: peer["blocks"]),
        ("peer",),
    ),
    Described(
        "kvtier_peer_fetched_bytes",
        "counter",
        "Bytes of their payloads.",
        _per_peer(lambda peer: peer["bytes"]),
        ("peer",),
    ),
    Described(
        "kvtier_peer_events",
        "counter",
        "What became of blocks asked of other hosts, by event, and the bytes that came.",
        several("peers", "counters"),
        ("event",),
        alone(PEER_EVENTS),
    ),
    Described(
        "kvtier_offers",
        "counter",
        "Blocks of offers between hosts: made, and of these accepted; of those made to this host taken, and declined.",
        _with_peers(lambda status: {(what,): count for what, count in status["offers"].items()}),
        ("what",),
        alone(OFFERS),
    ),
    Described(
        "kvtier_lent_blocks",
        "counter",
        "Blocks that other hosts were lent.",
        _with_peers(lambda status: {(): status["lent"]}),
    ),
    Described(
        "kvtier_lent_bytes", "counter", "Bytes of their slots.", _with_peers(lambda status: {(): status["lent_nbytes"]})
    ),
)
INDEX = (
    Described("kvtier_index_up", "gauge", "Whether the index answers.", one("index", "ok")),
    Described(
        "kvtier_incarnation",
        "gauge",
        "Number of this life of the host in the index; greater than that of any before.",
        one("index", "incarnation"),
    ),
    Described("kvtier_index_nodes", "gauge", "Live hosts that the index knows.", one("index", "nodes_alive")),
    Described(
        "kvtier_index_publishing",
        "gauge",
        "Whether the index is to be told everything again.",
        one("index", "needs_publish"),
    ),
    Described(
        "kvtier_index_queued_updates", "gauge", "Updates that the index was not told yet.", one("index", "queued")
    ),
    Described("kvtier_index_lag_seconds", "gauge", "How long the oldest of them has waited.", one("index", "lag")),
    Described(
        "kvtier_index_breaker_open",
        "gauge",
        "Whether lookups do not ask the index because it did not answer.",
        one("index", "breaker_open"),
    ),
    Described("kvtier_index_lookups", "counter", "Lookups in the index.", one("index", "lookups")),
    Described(
        "kvtier_index_round_trips", "counter", "Round trips of lookups to the index.", one("index", "round_trips")
    ),
    Described(
        "kvtier_index_lookup_errors", "counter", "Lookups without an answer in time.", one("index", "lookup_errors")
    ),
    Described(
        "kvtier_index_lookups_unasked",
        "counter",
        "Lookups that asked nobody because the breaker was open.",
        one("index", "unasked"),
    ),
    Described(
        "kvtier_index_breaker_opened", "counter", "Times that lookups stopped asking.", one("index", "breaker_opened")
    ),
    Described("kvtier_index_updates", "counter", "Updates that the index was told.", one("index", "told")),
    Described(
        "kvtier_index_update_errors",
        "counter",
        "Batches of updates, heartbeats and other background calls that failed.",
        one("index", "update_errors"),
    ),
    Described(
        "kvtier_index_dropped_updates",
        "counter",
        "Updates dropped because too many waited; everything is published again then.",
        one("index", "dropped"),
    ),
    Described(
        "kvtier_index_swept_rounds",
        "counter",
        "Rounds through the whole index that this host has ended.",
        one("index", "swept_rounds"),
    ),
    Described("kvtier_index_swept_keys", "counter", "Keys looked at in them.", one("index", "swept_keys")),
    Described(
        "kvtier_index_swept_dead",
        "counter",
        "Keys deleted or trimmed because the dead told of them.",
        one("index", "swept_dead"),
    ),
    Described("kvtier_index_sweep_errors", "counter", "Rounds given up.", one("index", "sweep_errors")),
    Described(
        "kvtier_index_mended_blocks",
        "counter",
        "Blocks of which the index did not say what this host has, by what was wrong.",
        _mended,
        ("what",),
        alone(MENDED),
    ),
)
EVENTS = (
    Described(
        "kvtier_events_up",
        "gauge",
        "Whether events for routers are published; no series where they are not configured.",
        lambda status: {(): int(not status["events"]["fault"])} if status["events"] else None,
    ),
    Described(
        "kvtier_events_waiting_blocks", "gauge", "Blocks whose changes wait to be published.", one("events", "waiting")
    ),
    Described("kvtier_events_batches", "counter", "Batches of events published.", one("events", "batches")),
    Described("kvtier_events_blocks", "counter", "Blocks that they told of.", one("events", "blocks")),
    Described("kvtier_events_replays", "counter", "Requests for what was missed.", one("events", "replays")),
    Described("kvtier_events_dumps", "counter", "Dumps that were begun.", one("events", "dumps")),
    Described(
        "kvtier_events_lost",
        "counter",
        "Times that more changed than may wait; routers fetch a dump then.",
        one("events", "lost"),
    ),
)
TENANTS = (
    Described(
        "kvtier_tenant_used_bytes",
        "gauge",
        "Bytes that a tenant's blocks take in a tier.",
        lambda status: {
            (tenant["tenant"], tier): nbytes
            for tenant in status["tenants"]
            for tier, nbytes in tenant["nbytes"].items()
        },
        ("tenant", "tier"),
    ),
    Described(
        "kvtier_tenant_pinned_bytes",
        "gauge",
        "Bytes of a tenant's blocks that are pinned.",
        _per_tenant(lambda tenant: tenant["pinned_nbytes"]),
        ("tenant",),
    ),
    Described(
        "kvtier_tenant_sessions",
        "gauge",
        "Sessions of a tenant's engines.",
        _per_tenant(lambda tenant: tenant["sessions"]),
        ("tenant",),
    ),
    Described(
        "kvtier_tenant_refused",
        "counter",
        "What a tenant was refused, by what there was too much of: bytes in the CPU tier, requests a second, calls at "
        "a time, sessions, keyspaces.",
        lambda status: {
            (tenant["tenant"], what): tenant["refused"].get(what, 0) for tenant in status["tenants"] for what in OVER
        },
        ("tenant", "what"),
    ),
)
FLEET = (*PEERS, *INDEX, *EVENTS, *TENANTS)
