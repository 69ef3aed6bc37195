"""The connector's counters in vLLM's logs and metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTED = {
    "lookups": "Requests that were looked up in kvtier",
    "asked_tokens": "Tokens of these requests",
    "found_tokens": "Tokens that kvtier had of them",
    "loaded_tokens": "Tokens that were loaded from kvtier",
    "failed_tokens": "Tokens that were promised and could not be loaded; they were computed",
    "saved_blocks": "Blocks that were saved to kvtier, or were there already",
}
BY_REASON = {
    "missed": "Requests that could not be looked up, by reason",
    "refused": "Saves that were refused, by reason",
    "unstorable": "Requests whose KV cannot be named by what it is computed from, by reason",
}


class KVTierStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report, by name; of those by reason the name is `what:reason`."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVTierStats) -> KVTierStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class KVTierMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as counters: `vllm:kvtier_lookups` and so on, and `vllm:kvtier_missed{reason=}`."""

    def __init__(self, config: Any, types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, types, labels, values)
        make = types[PrometheusCounter]
        self._plain = {name: make(f"vllm:kvtier_{name}", text, labelnames=labels) for name, text in COUNTED.items()}
        self._reasons = {
            name: make(f"vllm:kvtier_{name}", text, labelnames=[*labels, "reason"]) for name, text in BY_REASON.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            what, _, reason = name.partition(":")
            if reason and what in self._reasons:
                self._reasons[what].labels(*values, reason).inc(count)
            elif what in self._plain:
                self._plain[what].labels(*values).inc(count)
