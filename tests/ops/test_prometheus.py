"""A real Prometheus and a real host: rules say what the exporter says, alerts begin and end with their cause."""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest
import torch

import kvtier
from kvtier.client.door import DoorSession
from kvtier.testing.session import chain, save
from kvtier.tiers.base import TierNumber
from tests.cluster.kit import Cluster, cluster_in_temporary_folders, within
from tests.ops.monitoring import dashboard, panels, rules
from tests.ops.prometheus import Prometheus, prometheus
from tests.truth.host import Scrape

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus (Debian: prometheus)"),
]
PATIENCE = 60.0
A_DAY = {"kvtier:hit_ratio_of_past:ratio"}
"""Needs one."""
SPEC = kvtier.KVSpec(layers=2, kv_heads=2, head_dim=32, dtype="bfloat16")


def work(cluster: Cluster) -> None:
    """Save and load by a real client, and ask for what there is not."""
    cache = kvtier.connect(cluster.socket)
    try:
        space = cache.keyspace(SPEC, model="m", revision="1", plan="int8")
        tokens = list(range(320))
        kv = torch.randn(2, 2, 320, 2, 32).to(torch.bfloat16)
        assert space.save(tokens, kv).result(10.0).blocks == 5
        for _ in range(3):
            with space.match(tokens + list(range(9000, 9128)), wait=1.0) as hit:
                assert hit.load(torch.empty(2, 2, 448, 2, 32, dtype=torch.bfloat16)) == 320
    finally:
        cache.close()


def utilisation(url: str) -> dict[frozenset[tuple[str, str]], float]:
    """Of now, as the exporter says: hot blocks still move to the GPU tier."""
    scraped = Scrape(url)
    used, capacity = scraped.all("kvtier_tier_used_bytes"), scraped.all("kvtier_tier_capacity_bytes")
    return {frozenset({("tier", tier)}): used[tier,] / capacity[tier,] for (tier,) in used}


def settles(made: Prometheus, expected: float, name: str, **labels: str) -> None:
    """Rules come after scrapes, by a second or two."""
    within(PATIENCE, lambda: made.value(name, **labels) == pytest.approx(expected))


def test_rules_and_alerts_over_a_host(tmp_path):
    with cluster_in_temporary_folders() as cluster:
        cluster.nvme_dir.write_text("in the way")
        assert "nvme" in cluster.cli("up")
        url = cluster.host()["metrics"]["url"]
        with prometheus(tmp_path, url) as made:
            within(PATIENCE, lambda: made.value("kvtier_asked_blocks_total", instance=url.split("/")[2]) == 0)

            # NVMe is off, and then it is not.
            within(PATIENCE, lambda: made.firing() == {"KvtierNvmeOff"})
            cluster.nvme_dir.unlink()
            within(PATIENCE, lambda: made.firing() == set())

            work(cluster)
            session = DoorSession(cluster.socket)
            assert save(session, 0, 4) == 4
            assert session.move(chain(0, 4), TierNumber.NVME, 10.0) == 4
            scraped = Scrape(url)
            asked, hits = scraped.one("kvtier_asked_blocks"), scraped.some("kvtier_hit_blocks")
            assert (asked, sum(hits.values()), scraped.some("kvtier_miss_blocks")) == (21, 15, {"absent": 6})
            # Counters were 0 at the first look, so that their rates are in the same ratio as they are.
            within(PATIENCE, lambda: made.value("kvtier:stored_bytes:rate5m"))
            within(PATIENCE, lambda: made.value("kvtier:moved_bytes:rate5m", source="cpu", target="nvme"))
            for tier, count in hits.items():
                settles(made, count / asked, "kvtier:hit_ratio:rate5m", tier=tier)
            settles(made, 6 / 21, "kvtier:miss_ratio:rate5m", reason="absent")
            settles(made, 15 / 21, "kvtier:hit_ratio:rate15m")
            settles(made, 15 / 21, "kvtier:window_hits:ratio")
            assert made.value("kvtier:refused_blocks:ratio_rate5m", reason="pressure") == 0
            assert made.value("kvtier:asked_again:ratio_rate1h") == 0
            assert made.value("kvtier:hosts_scraped:count") == made.value("kvtier:hosts_in_index:max") == 1
            within(PATIENCE, lambda: made.query("kvtier:tier_utilization:ratio") == pytest.approx(utilisation(url)))
            stored, raw = scraped.some("kvtier_codec_stored_bytes"), scraped.some("kvtier_codec_raw_bytes")
            settles(made, stored["int8"] / raw["int8"], "kvtier:codec_bytes:ratio", codec="int8")
            gap = scraped.one("kvtier_ceiling_hit_ratio") - 15 / 21
            settles(made, max(gap, 0.0), "kvtier:ceiling_gap:ratio")

            faults = made.rules()
            assert {name: fault for name, fault in faults.items() if fault} == {}
            names = {rule.get("record") or rule["alert"] for rule in rules()}
            assert set(faults) == names
            for name in sorted({rule["record"] for rule in rules("rules")} - A_DAY):
                within(PATIENCE, lambda n=name: made.query(n))
            for panel in panels(dashboard()):
                for target in panel["targets"]:
                    made.query(re.sub(r"\$(job|host)", ".+", target["expr"]).replace("$__rate_interval", "1m"))

            # An engine hangs, and goes on.
            assert made.firing() == set()
            held = session.match(chain(0, 4), 5.0)
            within(PATIENCE, lambda: made.firing() == {"KvtierLeasesStuck"})
            session.release(held.lease)
            within(PATIENCE, lambda: made.firing() == set())

            # Redis hangs while something is saved, and answers again.
            redis = cluster.status()["redis"]["pid"]
            os.kill(redis, signal.SIGSTOP)
            try:
                assert save(session, 100, 2) == 2
                within(PATIENCE, lambda: "KvtierIndexLags" in made.firing())
            finally:
                os.kill(redis, signal.SIGCONT)
            within(PATIENCE, lambda: made.firing() == set())
            session.close()

            cluster.cli("down", "--flush", "0")
            within(PATIENCE, lambda: "KvtierFleetGone" in made.firing())
