"""Prometheus metrics of one host.

    described   what is said of a metric: its name, type, labels, help, and where its numbers are in a status
    counters    what a host counts
    tiers       how full its tiers are, and how they fare
    gauges      what it has and does now, and how long things take
    fleet       what lies around it: other hosts, the index, routers, tenants
    collector   makes samples of a status
    exporter    an HTTP server for them, and for readiness

All metrics stand in the tables of these four; the collector, docs/metrics.md and the tests go by them. Nothing is
counted here: the hierarchy counts plain integers, and whoever scrapes gets them as they are then. A series whose labels
are known beforehand is there, at 0, from the start, so that the first event is an increase. Every series has the label
`host`; `tier` is one of gpu, cpu, nvme, peer.
"""

from kvtier_services.monitor.metrics.collector import METRICS, HostCollector
from kvtier_services.monitor.metrics.exporter import Exporter

__all__ = ["METRICS", "Exporter", "HostCollector"]
