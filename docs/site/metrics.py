"""The page of the metrics, from the exporter's own table."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier_services.monitor.metrics import METRICS
from kvtier_services.monitor.metrics.described import Described

_HEAD = """\
# Metrics

Each host's exporter listens on `metrics.host:metrics.port` (127.0.0.1:9400; 0 for any free port, which `kvtier status`
shows). If the port is taken, kvtier runs without metrics and says so.

* `/metrics` is for Prometheus.
* `/ready` answers 200 and `ok` while the host serves, and 503 with the reason while it does not: it begins, it ends,
  or it is being emptied. Nobody answers before the host has its memory.

Every series has the label `host`, the host's name; Prometheus adds its own `instance` and `job`. `tier` is one of
`gpu`, `cpu`, `nvme` and `peer` (another host's memory). Sizes are bytes, times are seconds.

## One denominator

A block that an engine asks for is counted once: as a hit of the tier that had it, or as a miss with a reason.

```text
kvtier_asked_blocks_total = sum by (host) (kvtier_hit_blocks_total) + sum by (host) (kvtier_miss_blocks_total)
```

So a hit ratio is hits over asked, by tier, and the parts add up:

```text
sum by (host, tier) (rate(kvtier_hit_blocks_total[5m]))
  / ignoring (tier) group_left sum by (host) (rate(kvtier_asked_blocks_total[5m]))
```

Blocks that an engine computes without having asked are not in it, nor is what the other ranks of the same engine ask
for the same prompt. A block that was brought up from NVMe for the one who asked is a hit of `nvme`, and the next time
of `cpu`. `kvtier_miss_blocks_total{reason="absent"}` are blocks that nobody has; all other reasons are blocks that
somebody has and that were not given ([Reasons](reasons.md)).

## How good can it be

`kvtier_ceiling_hit_ratio` is what a cache of any size would have hit: of the blocks asked for during the last hour,
those that had been asked for before in that hour, and never less than what was hit. A hit ratio that is close to it
cannot be raised by more memory; one far below it can, if `kvtier_asked_again_blocks_total` rises too: these are blocks
that this host evicted and then missed. Compare it with `kvtier_window_hit_blocks` over `kvtier_window_asked_blocks`,
which are of the same hour. What was stored before the hour began and was not asked for again is not in it: soon after
a start it may be too low.
`kvtier_eviction_age_seconds` says for how long a block was not used before it had to make room.

## What a restart does

Counters and histograms are of one life of the host's process, which began at `kvtier_start_time_seconds`; they begin
at 0 again with the next, and `rate` and `increase` take care of that. `kvtier_incarnation` is greater in each life.
`kvtier_tier_events_total` and `kvtier_checksum_failures_total` of a tier with a process of its own begin anew with
that process. Gauges are right from the first scrape on; what NVMe kept is counted again as soon as its process
answers. The window is empty after a restart, and full after an hour (`kvtier_window_seconds`).

A series with labels is there from the start, at 0, where their values are known beforehand, so that the first event is
an increase; others appear with their first event. Where a host can have no peers, publishes no events, or has an index
of its own only, there are no series of these.

What the metrics cost is in [benchmarks.md](benchmarks.md): a scrape holds the host's lock for a fraction of a
millisecond, however many blocks there are.

(Generated: `python -m docs.site.reference`.)
"""

_PROCESS = """\
`process_resident_memory_bytes`, `process_virtual_memory_bytes`, `process_cpu_seconds_total`, `process_open_fds`,
`process_max_fds` and `process_start_time_seconds`, as prometheus_client has them, of the CPU tier's process. Its
resident memory has the arena in it.
"""


def metrics() -> str:
    """The page of the metrics."""
    return "\n".join(
        [
            _HEAD,
            "## Counters\n",
            _table(metric for metric in METRICS if metric.kind == "counter"),
            "## Gauges\n",
            _table(metric for metric in METRICS if metric.kind == "gauge"),
            "## Histograms\n",
            "Each has `_bucket{le}`, `_sum` and `_count`.\n",
            _table(metric for metric in METRICS if metric.kind == "histogram"),
            "## Of the process\n",
            _PROCESS,
        ]
    )


def _table(described: Iterable[Described]) -> str:
    rows = ["| metric | labels | |", "|---|---|---|"]
    for metric in sorted(described, key=lambda one: one.name):
        name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
        labels = ", ".join(f"`{label}`{_values(metric, place)}" for place, label in enumerate(metric.labels))
        rows.append(f"| `{name}` | {labels} | {metric.text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def _values(metric: Described, place: int) -> str:
    """Those that are there from the start; of tiers they are the same everywhere."""
    if metric.labels[place] == "tier" or not metric.known:
        return ""
    return ": " + ", ".join(dict.fromkeys(labels[place] for labels in metric.known))
