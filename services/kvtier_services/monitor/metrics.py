"""Prometheus metrics of one host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier import __version__
from kvtier.hierarchy.stats import SECONDS_BUCKETS

log = logging.getLogger(__name__)

GAUGES = (
    ("sessions", "kvtier_sessions", "Engines that are attached."),
    ("leases", "kvtier_leases", "Leases that are held."),
    ("leased_nbytes", "kvtier_leased_bytes", "Bytes of leased blocks, once for each lease."),
    ("reservations", "kvtier_reservations", "Reservations that are open."),
    ("staging", "kvtier_staging_blocks", "Blocks on their way into the CPU tier."),
    ("pins", "kvtier_pins", "Blocks that are pinned."),
    ("pinned_nbytes", "kvtier_pinned_bytes", "Bytes of pinned blocks."),
    ("blocks", "kvtier_blocks", "Blocks that some tier of this host has."),
)
COUNTERS = (
    ("lookups", "kvtier_lookups", "Lookups of prefixes, by result.", "result"),
    ("hits", "kvtier_hit_blocks", "Blocks leased, by the tier that had them.", "tier"),
    ("misses", "kvtier_miss_blocks", "Blocks asked for and not leased, by reason.", "reason"),
    ("tokens", "kvtier_hit_tokens", "Tokens leased, by the tier that had them.", "tier"),
    ("refused", "kvtier_refused_blocks", "Blocks that a save got no slot for, by reason.", "reason"),
    ("dropped", "kvtier_dropped_blocks", "Blocks that left the last tier that had them, by reason.", "reason"),
    ("faults", "kvtier_faults", "What went wrong, by reason.", "reason"),
)
USAGE = (
    ("used", "used_bytes", "Bytes that a {} holds, with all overhead."),
    ("capacity", "capacity_bytes", "Bytes that a {} may hold."),
    ("blocks", "blocks", "Blocks that a {} has."),
)
Status = Mapping[str, Any]

INDEX_COUNTERS = (
    ("lookups", "kvtier_index_lookups", "Lookups in the index."),
    ("round_trips", "kvtier_index_round_trips", "Round trips to its server."),
    ("lookup_errors", "kvtier_index_lookup_errors", "Lookups without an answer in time."),
    ("unasked", "kvtier_index_lookups_unasked", "Lookups that asked nobody because the server did not answer lately."),
    ("breaker_opened", "kvtier_index_breaker_opened", "Times that lookups stopped asking."),
    ("told", "kvtier_index_updates", "Updates told."),
    ("update_errors", "kvtier_index_update_errors", "Batches, heartbeats and other background calls that failed."),
    ("dropped", "kvtier_index_dropped_updates", "Updates dropped because too many waited; all is published again."),
    ("swept_rounds", "kvtier_index_swept_rounds", "Rounds through the whole index that this host has ended."),
    ("swept_keys", "kvtier_index_swept_keys", "Keys looked at in them."),
    ("swept_dead", "kvtier_index_swept_dead", "Keys deleted or trimmed because the dead told of them."),
    ("sweep_errors", "kvtier_index_sweep_errors", "Rounds given up."),
)


class HostCollector(Collector):
    """Reads a hierarchy's status when Prometheus asks."""

    def __init__(self, status: Callable[[], Status]) -> None:
        """Collect nothing yet.

        Args:
            status: `Hierarchy.status`.
        """
        self._status = status

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask for the status."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All metrics of the host."""
        status = self._status()
        yield _gauge("kvtier_build_info", "Version of kvtier.", 1, version=__version__)
        yield from _tiers(status["tiers"])
        yield from _devices(status["tiers"])
        for field, name, text in GAUGES:
            yield _gauge(name, text, status[field])
        for field, name, text, label in COUNTERS:
            yield _counter(name, text, label, status[field])
        yield _labelled("kvtier_queue", "What waits for the background, by kind of work.", "queue", status["queues"])
        yield _labelled(
            "kvtier_tier_read_bytes_per_second", "How fast blocks come from a tier.", "tier", status["bandwidth"]
        )
        yield _labelled(
            "kvtier_oldest_seconds", "Age of the oldest lease and reservation.", "kind", _oldest(status["held"])
        )
        yield _counter(
            "kvtier_admission_refused_blocks",
            "Blocks that were not written to NVMe, by reason.",
            "reason",
            status["admission"]["refused"],
        )
        asked = sum(status["hits"].values()) + sum(status["misses"].values())
        for name, text, value in (
            ("kvtier_asked_blocks", "Blocks asked for.", asked),
            ("kvtier_stored_blocks", "Blocks saved.", status["stored"]),
            ("kvtier_stored_bytes", "Bytes saved.", status["stored_nbytes"]),
        ):
            yield CounterMetricFamily(name, text, value=value)
        yield _moves("kvtier_moves", "Blocks moved between tiers.", status["moves"])
        yield _moves("kvtier_moved_bytes", "Bytes moved between tiers.", status["moved_nbytes"])
        for what in ("load", "save"):
            yield _histogram(what, status["seconds"].get(what))
        if status["peers"]:
            yield from _peers(status)
        yield from _index(status["index"])
        if status["events"]:
            yield from _events(status["events"])


class Exporter:
    """Serves a collector over HTTP, on a thread of its own.

    Attributes:
        url: where; empty when it could not listen.
        fault: why it could not.
    """

    def __init__(self, status: Callable[[], Status], *, host: str, port: int) -> None:
        """Start serving.

        Args:
            status: `Hierarchy.status`.
            host: address to listen on.
            port: 0 for any free one.
        """
        self.url = self.fault = ""
        self._close: Callable[[], None] = lambda: None
        registry = CollectorRegistry()
        registry.register(HostCollector(status))
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as exc:
            self.fault = (
                f"no metrics: cannot listen on {host}:{port} ({exc.strerror}); set metrics.port to a free one, or 0"
            )
            log.warning("exporter off: %s", self.fault)
            return

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._close = close
        self.url = f"http://{host}:{server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening; idempotent."""
        close, self._close = self._close, lambda: None
        close()


def _tiers(tiers: Iterable[Status]) -> Iterable[Metric]:
    return _usage("tier", ["tier"], [([tier["label"]], tier) for tier in tiers])


def _devices(tiers: Iterable[Status]) -> Iterable[Metric]:
    """Of the tiers that have several."""
    devices = [([tier["label"], device["device"]], device) for tier in tiers for device in tier.get("devices", ())]
    return _usage("device", ["tier", "device"], devices) if devices else ()


def _usage(what: str, labels: list[str], usages: Iterable[tuple[list[str], Status]]) -> Iterable[Metric]:
    families = [GaugeMetricFamily(f"kvtier_{what}_{name}", text.format(what), labels=labels) for _, name, text in USAGE]
    up = GaugeMetricFamily(f"kvtier_{what}_up", f"Whether a {what} works: 0 while it has a fault.", labels=labels)
    counted = f"What a {what} counts itself, by event."
    events = CounterMetricFamily(f"kvtier_{what}_events", counted, labels=[*labels, "event"])
    for values, usage in usages:
        for family, (field, _, _) in zip(families, USAGE, strict=True):
            family.add_metric(values, usage[field])
        up.add_metric(values, 0 if usage["fault"] else 1)
        for event, count in usage["counters"].items():
            events.add_metric([*values, event], count)
    return [*families, up, events]


PEERS = (
    ("blocks", "kvtier_peer_fetched_blocks", "Blocks fetched from another host."),
    ("bytes", "kvtier_peer_fetched_bytes", "Bytes of them."),
)


def _peers(status: Status) -> Iterable[Metric]:
    """What goes to and comes from other hosts."""
    hosts, counters = status["peers"]["hosts"], status["peers"]["counters"]
    for field, name, text in PEERS:
        yield _counter(name, text, "peer", {one["host"]: one[field] for one in hosts})
    pace = "How fast blocks come from another host on one connection; 0 when none came of late."
    yield _labelled(
        "kvtier_peer_bytes_per_second", pace, "peer", {one["host"]: one["bytes_per_second"] for one in hosts}
    )
    up = "Whether another host is asked: 0 while it is avoided because it failed."
    yield _labelled("kvtier_peer_up", up, "peer", {one["host"]: 0 if one["avoided"] else 1 for one in hosts})
    yield _counter("kvtier_peer_events", "What became of blocks asked of other hosts, by event.", "event", counters)
    yield _counter("kvtier_offers", "Blocks in offers between hosts, by what became of them.", "what", status["offers"])
    yield CounterMetricFamily("kvtier_lent_blocks", "Blocks that other hosts were lent.", value=status["lent"])
    yield CounterMetricFamily("kvtier_lent_bytes", "Bytes of their slots.", value=status["lent_nbytes"])


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _oldest(held: Iterable[Mapping[str, Any]]) -> Mapping[str, float]:
    ages = {"lease": 0.0, "reservation": 0.0}
    for one in held:
        if one["kind"] in ages:
            ages[one["kind"]] = max(ages[one["kind"]], one["age"])
    return ages


def _counter(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _moves(name: str, text: str, moves: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["source", "target"])
    for way, count in moves.items():
        family.add_metric(way.split(">"), count)
    return family


def _histogram(what: str, observed: Mapping[str, Any] | None) -> Metric:
    family = HistogramMetricFamily(f"kvtier_{what}_seconds", f"Time of a client's {what}, as the client reports it.")
    counts = observed["buckets"] if observed else [0] * (len(SECONDS_BUCKETS) + 1)
    below, buckets = 0, []
    for bound, count in zip([*map(str, SECONDS_BUCKETS), "+Inf"], counts, strict=True):
        below += count
        buckets.append((bound, below))
    family.add_metric([], buckets, observed["sum"] if observed else 0.0)
    return family


def _events(events: Mapping[str, Any]) -> Iterable[Metric]:
    yield _gauge("kvtier_events_up", "Whether events are published.", int(not events["fault"]))
    yield _gauge("kvtier_events_waiting_blocks", "Blocks whose changes wait to be published.", events["waiting"])
    for field, name, text in (
        ("batches", "kvtier_events_batches", "Batches published."),
        ("blocks", "kvtier_events_blocks", "Blocks that they told of."),
        ("replays", "kvtier_events_replays", "Requests for what was missed."),
        ("dumps", "kvtier_events_dumps", "Dumps that were begun."),
        ("lost", "kvtier_events_lost", "Times that more changed than may wait; routers fetch a dump then."),
    ):
        yield CounterMetricFamily(name, text, value=events[field])


def _index(index: Mapping[str, Any]) -> Iterable[Metric]:
    kind = str(index["kind"])
    yield _gauge("kvtier_index_up", "Whether the index answers.", int(bool(index["ok"])), kind=kind)
    yield _gauge("kvtier_index_queued_updates", "Updates that the index was not told yet.", index["queued"], kind=kind)
    yield _gauge("kvtier_index_nodes", "Live hosts that the index knows.", index["nodes_alive"], kind=kind)
    yield _gauge("kvtier_index_publishing", "Whether it is to be told everything.", index["needs_publish"], kind=kind)
    for field, name, text in INDEX_COUNTERS:
        if field in index:
            family = CounterMetricFamily(name, text, labels=["kind"])
            family.add_metric([kind], index[field])
            yield family
    if "reconciled" in index:
        mended = {what: count for what, count in index["reconciled"].items() if what != "compared"}
        yield _counter("kvtier_index_mended_blocks", "Differences from what the host has, mended.", "what", mended)
