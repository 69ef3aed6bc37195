"""Samples of a host's status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvtier_services.monitor.metrics.counters import COUNTERS
from kvtier_services.monitor.metrics.described import Described, Labels, Status
from kvtier_services.monitor.metrics.fleet import FLEET
from kvtier_services.monitor.metrics.gauges import GAUGES, HISTOGRAMS
from kvtier_services.monitor.metrics.tiers import OF_TIERS

log = logging.getLogger(__name__)

METRICS: tuple[Described, ...] = (*COUNTERS, *OF_TIERS, *GAUGES, *HISTOGRAMS, *FLEET)
FAMILIES: dict[str, type[CounterMetricFamily | GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


class HostCollector(Collector):
    """Reads a host's status when Prometheus asks.

    Args:
        status: `Hierarchy.status`.
        tenants: tells of the tenants of the remote door, as that does.
    """

    def __init__(self, status: Callable[[], Status], tenants: Callable[[], Sequence[Status]] = tuple) -> None:
        self._status = status
        self._tenants = tenants
        self._broken: set[str] = set()

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask for the status."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All metrics of the host; one that cannot be made is left out and logged, and the others are there."""
        status = {**self._status(), "tenants": self._tenants()}
        for described in METRICS:
            try:
                values = described.read(status)
                found = None if values is None else _family(described, dict.fromkeys(described.known, 0) | dict(values))
            except Exception:
                if described.name not in self._broken:
                    self._broken.add(described.name)
                    log.exception("a metric cannot be made of the status: name=%s", described.name)
                continue
            if found is not None:
                yield found


class OfHost(Collector):
    """What other collectors have, with a host's name on every sample."""

    def __init__(self, host: str, *collectors: Collector) -> None:
        self._host = host
        self._collectors = collectors

    def describe(self) -> Iterable[Metric]:
        """Nothing, as above."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All of theirs."""
        for collector in self._collectors:
            for family in collector.collect():
                family.samples = [
                    sample._replace(labels={"host": self._host, **sample.labels}) for sample in family.samples
                ]
                yield family


def _family(described: Described, values: Mapping[Labels, Any]) -> Metric:
    if described.kind == "histogram":
        histogram = HistogramMetricFamily(described.name, described.text, labels=described.labels)
        for labels, observed in values.items():
            bounds = [*map(floatToGoString, observed["bounds"]), "+Inf"]
            below = accumulate(observed["buckets"])
            histogram.add_metric(labels, list(zip(bounds, below, strict=True)), observed["sum"])
        return histogram
    family = FAMILIES[described.kind](described.name, described.text, labels=described.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
