"""The exporter's numbers are the hierarchy's."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from kvtier.block import slot_nbytes
from kvtier.client.local import LocalSession
from kvtier.memory.arena import Arena
from kvtier.testing.session import CAPACITY, NBYTES, chain, host_over, save
from kvtier.tiers.base import TierNumber
from kvtier_services.monitor.metrics import METRICS, Exporter, HostCollector, exporter
from kvtier_services.monitor.metrics.collector import OfHost
from tests.fleet_fixture import Fleet, patiently
from tests.hierarchy_fixture import SLOT_NBYTES, keys
from tests.hierarchy_fixture import save as fleet_save


@pytest.fixture
def host():
    with host_over(Arena.private(CAPACITY)) as made:
        yield made


@pytest.fixture
def session(host):
    made = LocalSession(host.hierarchy)
    yield made
    made.close()


@pytest.fixture
def value(host):
    return reader(host.hierarchy)


def reader(hierarchy):
    """What reads one sample, by its name and labels, as Prometheus does."""
    registry = CollectorRegistry()
    registry.register(HostCollector(hierarchy.status))

    def read(name: str, **labels: str) -> float:
        text = generate_latest(registry).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        raise AssertionError(f"no {name} {labels} in\n{text}")

    return read


def test_a_scripted_hour(host, session, value):
    save(session, 0, 3)
    session.release(session.match(chain(0, 5), 0.0).lease, 0.003)
    assert session.move(chain(0, 3), TierNumber.NVME, 5.0) == 3
    matched = session.match(chain(0, 3), 5.0)
    session.match(chain(50, 2), 0.0)
    session.reserve(chain(100, 1), [2 * CAPACITY], 0)

    assert value("kvtier_stored_blocks_total") == 3
    assert value("kvtier_stored_bytes_total") == 3 * NBYTES
    assert value("kvtier_lookups_total", result="full") == 1
    assert value("kvtier_lookups_total", result="partial") == 1
    assert value("kvtier_lookups_total", result="miss") == 1
    assert value("kvtier_hit_blocks_total", tier="cpu") == 3
    assert value("kvtier_hit_blocks_total", tier="nvme") == 3
    assert value("kvtier_hit_tokens_total", tier="nvme") == 3 * 64
    assert value("kvtier_miss_blocks_total", reason="absent") == 2 + 2
    assert value("kvtier_asked_blocks_total") == 5 + 3 + 2
    assert value("kvtier_moves_total", source="cpu", target="nvme") == 3
    assert value("kvtier_moves_total", source="nvme", target="cpu") == 3
    assert value("kvtier_moved_bytes_total", source="nvme", target="cpu") == 3 * NBYTES
    assert value("kvtier_refused_blocks_total", reason="too_large") == 1
    assert value("kvtier_sessions") == 1
    assert value("kvtier_leases") == 1
    assert value("kvtier_leased_bytes", tier="cpu") == 3 * slot_nbytes(NBYTES)
    assert value("kvtier_tier_capacity_bytes", tier="cpu") == host.hierarchy.state.cpu.pool.capacity
    assert value("kvtier_tier_blocks", tier="cpu") == 3
    assert value("kvtier_tier_blocks", tier="nvme") == 3
    assert value("kvtier_tier_up", tier="nvme") == 1
    assert value("kvtier_blocks") == 3
    assert value("kvtier_index_up") == 1
    assert value("kvtier_index_mended_blocks_total", what="missing") == 0
    assert value("kvtier_load_seconds_bucket", le="0.0025") == 0
    assert value("kvtier_load_seconds_bucket", le="0.005") == 1
    assert value("kvtier_load_seconds_bucket", le="+Inf") == 1
    assert value("kvtier_load_seconds_sum") == pytest.approx(0.003)
    assert value("kvtier_save_seconds_count") == 0

    assert session.pin(chain(0, 2), 60.0) == 2
    assert value("kvtier_pins") == 2
    assert value("kvtier_pinned_bytes", tier="cpu") == 2 * slot_nbytes(NBYTES)
    assert 0 <= value("kvtier_oldest_seconds", kind="lease") < 60
    assert value("kvtier_oldest_seconds", kind="reservation") == 0
    assert value("kvtier_queue", queue="moves") == 0
    assert session.unpin(chain(0, 2)) == 2

    session.condemn(chain(0, 1), "corrupt")
    assert value("kvtier_faults_total", reason="corrupt") == 1
    assert value("kvtier_dropped_blocks_total", reason="corrupt") == 1
    session.release(matched.lease)
    assert value("kvtier_leases") == 0


def samples_of(prefix, **status):
    """Of the metrics whose names begin so, of a status that has only this."""
    families = (metric for metric in METRICS if metric.name.startswith(prefix))
    return {(metric.name, *labels): value for metric in families for labels, value in metric.read(status).items()}


def test_an_emulated_gpu_is_a_gpu():
    tier = {"tier": "gpu", "label": "gpu(host)", "capacity": 2, "used": 1, "blocks": 1, "fault": "x"}
    found = samples_of("kvtier_tier_", tiers=[tier | {"counters": {"write_error": 3}}], bandwidth={})
    assert {labels[0] for _, *labels in found} == {"gpu"}
    assert found["kvtier_tier_up", "gpu"] == 0
    assert (found["kvtier_tier_events", "gpu", "write_error"], found["kvtier_tier_events", "gpu", "refused"]) == (3, 0)


def test_what_goes_down_again_is_no_counter():
    tier = {"tier": "cpu", "capacity": 2, "used": 1, "blocks": 1, "fault": "", "counters": {"quarantined": 4}}
    assert not samples_of("kvtier_tier_events", tiers=[tier])
    assert samples_of("kvtier_quarantined", tiers=[tier]) == {("kvtier_quarantined_blocks",): 4}


def test_each_device_of_a_tier_has_series_of_its_own():
    """The tier's own series are the sums: adding up a metric over its labels must not count anything twice."""
    well = {"device": "/mnt/a", "capacity": 2, "used": 1, "blocks": 7, "fault": "", "counters": {"corrupt": 3}}
    ill = {"device": "/mnt/b", "capacity": 3, "used": 2, "blocks": 5, "fault": "x", "counters": {}}
    tier = {"tier": "nvme", "label": "nvme", "devices": [well, ill]}
    found = samples_of("kvtier_device_", tiers=[tier])
    events = {name: found.pop(name) for name in list(found) if name[0] == "kvtier_device_events"}
    assert found == {
        ("kvtier_device_used_bytes", "nvme", "/mnt/a"): 1,
        ("kvtier_device_used_bytes", "nvme", "/mnt/b"): 2,
        ("kvtier_device_capacity_bytes", "nvme", "/mnt/a"): 2,
        ("kvtier_device_capacity_bytes", "nvme", "/mnt/b"): 3,
        ("kvtier_device_blocks", "nvme", "/mnt/a"): 7,
        ("kvtier_device_blocks", "nvme", "/mnt/b"): 5,
        ("kvtier_device_up", "nvme", "/mnt/a"): 1,
        ("kvtier_device_up", "nvme", "/mnt/b"): 0,
    }
    assert {name[2:]: count for name, count in events.items() if count} == {("/mnt/a", "corrupt"): 3}
    assert samples_of("kvtier_device_", tiers=[tier | {"devices": []}]) == {}


def test_a_busy_port_is_said_and_not_fatal(monkeypatch):
    def listen(*_args):
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(exporter, "listen", listen)
    made = Exporter(dict, name="a", host="127.0.0.1", port=9400)
    assert made.url == ""
    assert made.fault == (
        "no metrics: cannot listen on 127.0.0.1:9400 (Address already in use); set metrics.port to a free one, or 0"
    )
    made.close()


def test_events_are_counted_where_there_are_any(host, value):
    with pytest.raises(AssertionError, match="no kvtier_events_up"):
        value("kvtier_events_up")
    counts = {"batches": 3, "blocks": 70, "replays": 1, "dumps": 2, "lost": 0, "waiting": 5, "fault": ""}
    host.hierarchy.state.publishing = lambda: counts
    assert (value("kvtier_events_up"), value("kvtier_events_waiting_blocks")) == (1, 5)
    assert (value("kvtier_events_blocks_total"), value("kvtier_events_dumps_total")) == (70, 2)


def test_what_goes_from_host_to_host(monkeypatch):
    patiently(monkeypatch)
    with Fleet() as fleet:
        a, b = fleet.host("a"), fleet.host("b")
        fleet_save(a.session(), range(3))
        assert len(b.session().match(keys(range(3)), 5.0).slots) == 3
        fleet.network.unreachable.add(a.door)
        near, far = reader(b.hierarchy), reader(a.hierarchy)
        assert near("kvtier_hit_blocks_total", tier="peer") == 3
        assert near("kvtier_moves_total", source="peer", target="cpu") == 3
        assert near("kvtier_peer_events_total", event="read") == 1
        assert (near("kvtier_peer_up", peer=a.door), far("kvtier_peer_up", peer=b.door)) == (0, 1)
        assert far("kvtier_lent_blocks_total") == 3
        assert far("kvtier_lent_bytes_total") == 3 * SLOT_NBYTES


BOUNDED = {"tier", "source", "target", "reason", "result", "kind", "queue", "codec", "event", "what", "version"}
"""Labels of which kvtier itself chooses the values."""
CONFIGURED = {"device", "peer", "tenant"}
"""Labels of which the configuration does: devices of a host, hosts of a fleet, tenants of a tokens file."""


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
class TestNames:
    def test_is_in_its_convention(self, metric):
        """Prometheus': own prefix, no colons, base units, a suffix of its type, and it says what it is."""
        assert re.fullmatch(r"kvtier_[a-z][a-z0-9_]*[a-z0-9]", metric.name)
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_created", "_info_info"))
        assert not re.search(r"_(ms|us|ns|milli|kib|mib|gib|kb|mb|gb|percent|nbytes)(_|$)", metric.name)
        assert metric.kind != "histogram" or metric.name.endswith("_seconds")
        assert ("seconds" in metric.name) <= metric.name.endswith(("seconds", "bytes_per_second"))
        assert ("bytes" in metric.name) <= metric.name.endswith(("bytes", "bytes_per_second"))
        assert metric.text.endswith((".", ")"))
        assert 10 < len(metric.text) < 200

    def test_has_few_series(self, metric):
        assert set(metric.labels) <= BOUNDED | CONFIGURED
        assert "host" not in metric.labels, "the exporter adds it"
        assert "le" not in metric.labels
        assert len(set(metric.known)) == len(metric.known) <= 40
        assert all(len(labels) == len(metric.labels) for labels in metric.known)


def test_names_are_names_of_one_metric_each():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    exposed = {
        f"{name}_total" if metric.kind == "counter" else name for name, metric in zip(names, METRICS, strict=True)
    }
    assert len(exposed) == len(names)


def test_every_series_has_its_host(host):
    registry = CollectorRegistry()
    registry.register(OfHost("here", HostCollector(host.hierarchy.status), ProcessCollector(registry=None)))
    for text, parse in (
        (generate_latest(registry), text_string_to_metric_families),
        (openmetrics(registry), openmetrics_families),
    ):
        families = list(parse(text.decode()))
        assert {family.name for family in families} >= {"kvtier_sessions", "process_open_fds"}
        assert {sample.labels["host"] for family in families for sample in family.samples} == {"here"}


@pytest.mark.parametrize(
    ("path", "why", "status", "body"),
    [
        ("/ready", "", "200 OK", b"ok\n"),
        ("/ready", "it begins", "503 Service Unavailable", b"it begins\n"),
        ("/metrics", "it begins", "200 OK", b"all of them"),
        ("/", "", "404 Not Found", b"there is no / here; try /metrics or /ready\n"),
        ("/metrics/../secret", "", "404 Not Found", b"there is no /metrics/../secret here; try /metrics or /ready\n"),
    ],
)
def test_what_is_served(path, why, status, body):
    said = []

    def metrics(_environ, start_response):
        start_response("200 OK", [])
        return [b"all of them"]

    served = exporter.application(metrics, lambda: why)
    assert b"".join(served({"PATH_INFO": path}, lambda *args: said.append(args[0]))) == body
    assert said == [status]


def test_one_part_that_is_broken_leaves_all_others(host, caplog):
    whole = {**host.hierarchy.status(), "tenants": ()}
    collector = HostCollector(lambda: {**whole, "hits": None, "transfers": {"cpu>nvme": {}}})
    for _ in range(2):
        names = {family.name for family in collector.collect()}
    everything = {family.name for family in HostCollector(lambda: whole).collect()}
    assert everything - names == {"kvtier_asked_blocks", "kvtier_hit_blocks", "kvtier_transfer_seconds"}
    logged = [record.message.rpartition("=")[2] for record in caplog.records]
    assert sorted(logged) == ["kvtier_asked_blocks", "kvtier_transfer_seconds"], "once each, not at each scrape"
