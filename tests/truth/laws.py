"""What must be so after that day, whatever the exporter says."""

from __future__ import annotations

import resource
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from kvtier import __version__
from kvtier.block import slot_nbytes
from kvtier.testing.session import NBYTES
from kvtier_services.monitor.metrics import METRICS
from tests.truth.day import SLOT, SPEC, Day
from tests.truth.host import CPU, GPU, NVME, Scrape
from tests.truth.script import LOADED, SAVED


def nothing_yet(s: Scrape) -> None:
    """All that is known beforehand is there from the start, and 0."""
    for metric in METRICS:
        if metric.kind == "counter" and metric.known:
            found = s.all(metric.name, *metric.labels)
            assert set(metric.known) <= set(found), metric.name
            assert not any(found.values()), metric.name


def counters(day: Day, s: Scrape) -> None:
    """What was counted, against what the engine was answered and what passed at the edges."""
    host, script, gpu = day.host, day.script, day.host.gpu
    written = sum((edge.written for edge in host.nvme), Counter())
    read = sum((edge.read for edge in host.nvme), Counter())
    bytes_of = sum((edge.nbytes for edge in host.nvme), Counter())
    came = 3 + day.offered
    present = script.present()
    gone = script.stored - script.requested - set(present)

    assert s.one("kvtier_asked_blocks") == sum(script.hits.values()) + sum(script.misses.values()) + script.short
    assert s.some("kvtier_hit_blocks") == script.hits
    missed = s.some("kvtier_miss_blocks")
    assert missed.pop("absent") == script.misses["absent"]
    assert sum(missed.values()) == script.short, missed
    assert s.some("kvtier_hit_tokens") == script.tokens
    assert s.some("kvtier_lookups") == script.lookups
    assert s.one("kvtier_stored_blocks") == len(script.stored) - came
    ours = sum(day.codecs.values())
    assert s.one("kvtier_stored_bytes") == NBYTES * (len(script.stored) - came - 6) + ours
    assert s.some("kvtier_codec_stored_bytes") == day.codecs
    assert s.some("kvtier_codec_raw_bytes") == {"int8": 4 * SPEC.block_nbytes, "raw": 2 * SPEC.block_nbytes}
    assert s.some("kvtier_refused_blocks") == +script.refused
    assert s.one("kvtier_saved_prefill_seconds") == pytest.approx(script.prefilled)

    never = {key for key in gone if not written[key]}
    dropped = s.some("kvtier_dropped_blocks")
    assert never
    assert gone - never
    assert dropped == script.dropped | {"cpu_evicted": len(never), "nvme_evicted": len(gone - never)}
    assert s.some("kvtier_admission_refused_blocks") == {"endurance": len(never)}
    assert s.one("kvtier_asked_again_blocks") == len(script.again) > 0
    faults = s.some("kvtier_faults")
    assert bool(faults.pop("staging_no_room", 0)) <= bool(script.short)
    assert faults == {"nvme_lost": 1, "peer_lost": 1, "bad_checksum": 1}, faults
    assert s.some("kvtier_checksum_failures") == {"nvme": 1, "cpu": 1, "peer": 1}

    moves = {
        ("cpu", "nvme"): (written.total(), bytes_of["write"]),
        ("nvme", "cpu"): (read.total(), bytes_of["read"]),
        ("cpu", "gpu"): (gpu.written.total(), gpu.nbytes["write"]),
        ("gpu", "cpu"): (gpu.read.total(), gpu.nbytes["read"]),
        ("peer", "cpu"): (came, came * NBYTES),
    }
    assert s.all("kvtier_moves") == {way: blocks for way, (blocks, _) in moves.items()}
    assert s.all("kvtier_moved_bytes") == {way: nbytes for way, (_, nbytes) in moves.items()}

    into_cpu = len(script.stored) - came + read.total() + gpu.read.total() + came
    left = {
        "cpu": into_cpu - script.of("cpu") - script.left["cpu"],
        "gpu": gpu.written.total() - len(gpu.has()) - script.left["gpu"],
        "nvme": written.total() - sum(len(edge.has()) for edge in host.nvme) - script.left["nvme"],
    }
    elapsed = time.time() - host.began
    for tier, count in left.items():
        observed, ages = s.histogram("kvtier_eviction_age_seconds", tier)
        assert observed == count > 0
        assert 0 < ages < count * elapsed

    events = s.all("kvtier_tier_events", "tier", "event")
    devices = s.all("kvtier_device_events", "tier", "device", "event")
    assert {key: count for key, count in events.items() if key[0] == "gpu" and count} == {}
    for tier, event in (key for key in events if key[0] == "nvme"):
        assert events[tier, event] == sum(devices[tier, name, event] for name in host.settings.nvme_dirs)
    of_nvme = {event: count for (tier, event), count in events.items() if tier == "nvme"}
    exact = {"corrupt": 1, "evicted": left["nvme"], "read_nbytes": bytes_of["read"]}
    assert of_nvme.items() >= (exact | {"payload_nbytes": bytes_of["write"]}).items()
    assert bytes_of["write"] < of_nvme["written_nbytes"] <= of_nvme["device_nbytes"]
    assert of_nvme["written_nbytes"] - bytes_of["write"] < written.total() * 4096 + of_nvme["carried_nbytes"]
    assert not any(count for event, count in of_nvme.items() if "error" in event or event == "too_large")


def times(day: Day, s: Scrape) -> None:
    """How long things took, against the clock of who waited for them."""
    host, script = day.host, day.script
    calls = host.status()["door"]["calls"]
    count, total = s.histogram("kvtier_match_seconds")
    assert count == calls["Match"] >= script.matches
    assert 0 < total < script.seconds + 1.0
    count, total = s.histogram("kvtier_load_seconds")
    assert count == script.loads + 1
    assert script.loads * LOADED < total < script.loads * LOADED + 1.0
    count, total = s.histogram("kvtier_save_seconds")
    assert count == script.saves + 1
    assert script.saves * SAVED < total < script.saves * SAVED + 1.0
    for way, call in ((("cpu", "nvme"), "write"), (("nvme", "cpu"), "read")):
        several = [edge.batches[call] for edge in host.nvme]
        count, total = s.histogram("kvtier_transfer_seconds", *way)
        assert max(several) <= count <= sum(several)
        assert total >= max(edge.seconds[call] for edge in host.nvme)
    for way, call in ((("cpu", "gpu"), "write"), (("gpu", "cpu"), "read")):
        count, total = s.histogram("kvtier_transfer_seconds", *way)
        assert count == host.gpu.batches[call]
        assert host.gpu.seconds[call] <= total < host.gpu.seconds[call] + 1.0
    count, total = s.histogram("kvtier_transfer_seconds", "peer", "cpu")
    assert 2 <= count <= 3 + day.offered
    assert 0 < total < time.time() - host.began


def gauges(day: Day, s: Scrape) -> None:
    """What there is, against the processes that have it and an inspection of every block."""
    host, script = day.host, day.script
    present = script.present()
    slots = {key: slot_nbytes(block["nbytes"]) for key, block in present.items()}
    there = {tier: [key for key, block in present.items() if tier in block["tiers"]] for tier in ("gpu", "cpu", "nvme")}
    assert s.some("kvtier_tier_blocks") == {tier: len(keys) for tier, keys in there.items()}
    assert set(there["gpu"]) == host.gpu.has()
    assert set(there["nvme"]) == set().union(*(edge.has() for edge in host.nvme))
    assert s.one("kvtier_blocks") == len(present)
    assert s.some("kvtier_tier_capacity_bytes") == {"gpu": GPU, "cpu": CPU, "nvme": 2 * NVME}
    assert s.some("kvtier_tier_up") == dict.fromkeys(("gpu", "cpu", "nvme"), 1)
    used = s.some("kvtier_tier_used_bytes")
    assert (used["gpu"], used["cpu"]) == tuple(sum(slots[key] for key in there[tier]) for tier in ("gpu", "cpu"))
    assert sum(present[key]["nbytes"] for key in there["nvme"]) <= used["nvme"] <= 2 * NVME
    names = list(host.settings.nvme_dirs)
    of_device = s.all("kvtier_device_blocks", "tier", "device")
    assert of_device == {("nvme", name): len(edge.has()) for name, edge in zip(names, host.nvme, strict=True)}
    assert s.all("kvtier_device_capacity_bytes", "tier", "device") == {("nvme", name): NVME for name in names}
    assert s.all("kvtier_device_up", "tier", "device") == {("nvme", name): 1 for name in names}
    assert sum(s.all("kvtier_device_used_bytes", "tier", "device").values()) == used["nvme"]
    assert s.one("kvtier_quarantined_blocks") == 0
    assert s.one("kvtier_arena_missing_bytes") == CPU - used_at_most(host.settings.arena_dir)
    paces = s.all("kvtier_tier_read_bytes_per_second")
    assert all(1e5 < pace < 1e12 for pace in paces.values())

    assert s.all("kvtier_build_info") == {(__version__,): 1}
    assert host.began <= s.one("kvtier_start_time_seconds") <= host.began + 10.0
    assert s.one("kvtier_sessions") == 3

    asked = sum(script.hits.values()) + sum(script.misses.values()) + script.short
    assert s.one("kvtier_window_asked_blocks") == asked
    assert s.some("kvtier_window_hit_blocks") == script.hits
    distinct = s.one("kvtier_window_distinct_blocks")
    assert distinct == pytest.approx(len(script.asked), rel=0.03)
    hit = sum(script.hits.values()) / asked
    assert s.one("kvtier_ceiling_hit_ratio") == pytest.approx(max(1 - distinct / asked, hit))
    assert 0 < s.one("kvtier_window_seconds") <= time.time() - host.began

    process = psutil.Process()
    assert s.one("process_start_time_seconds") == pytest.approx(process.create_time(), abs=1.0)
    assert s.one("process_max_fds") == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert s.one("process_open_fds") == pytest.approx(process.num_fds(), abs=10)
    assert s.one("process_resident_memory_bytes") == pytest.approx(process.memory_info().rss, rel=0.2)
    assert s.one("process_virtual_memory_bytes") == pytest.approx(process.memory_info().vms, rel=0.2)
    spent = process.cpu_times()
    assert 0 < s.one("process_cpu_seconds") <= spent.user + spent.system + 0.1


def used_at_most(folder: Path) -> int:
    """Bytes that the arena's file has, of which its memory is made."""
    return min(CPU, max(file.stat().st_blocks * 512 for file in folder.iterdir() if file.is_file()))


def around(day: Day, s: Scrape, commands: int) -> None:
    """Other hosts, index, routers and tenants, against what those have."""
    host, script = day.host, day.script
    came = 3 + day.offered
    assert s.all("kvtier_peer_up") == {("b",): 1}
    assert s.all("kvtier_peer_fetched_blocks") == {("b",): came}
    assert s.all("kvtier_peer_fetched_bytes") == {("b",): came * NBYTES}
    assert 0 <= s.all("kvtier_peer_bytes_per_second")["b",] < 1e12
    assert s.some("kvtier_peer_events") == {"fetched": came, "bytes": came * NBYTES, "corrupt": 1}
    assert s.some("kvtier_offers") == {"taken": day.offered}
    assert s.one("kvtier_lent_blocks") == 10
    assert s.one("kvtier_lent_bytes") == 10 * SLOT

    index = host.hierarchy.state.index
    assert s.one("kvtier_index_up") == 1
    assert s.one("kvtier_index_nodes") == 2
    assert s.one("kvtier_index_publishing") == 0
    assert s.one("kvtier_incarnation") == max(node.incarnation for node in index.nodes() if node.host == "a")
    assert (s.one("kvtier_index_queued_updates"), s.one("kvtier_index_lag_seconds")) == (0, 0)
    assert s.one("kvtier_index_breaker_open") == 0
    assert len(script.stored) <= s.one("kvtier_index_updates") <= day.follower.blocks
    assert 0 < s.one("kvtier_index_round_trips") <= commands
    assert s.one("kvtier_index_round_trips") <= s.one("kvtier_index_lookups")
    swept = s.one("kvtier_index_swept_keys")
    assert 0 <= swept <= len(script.stored) * (1 + s.one("kvtier_index_swept_rounds"))
    for name in (
        "lookup_errors",
        "lookups_unasked",
        "breaker_opened",
        "update_errors",
        "dropped_updates",
        "swept_dead",
    ):
        assert s.one(f"kvtier_index_{name}") == 0, name
    assert s.one("kvtier_index_sweep_errors") == 0
    assert s.some("kvtier_index_mended_blocks") == {}

    assert s.one("kvtier_events_up") == 1
    assert s.one("kvtier_events_waiting_blocks") == 0
    first = day.before.one("kvtier_events_batches")  # before anybody could follow: that this life begins
    assert (first, s.one("kvtier_events_batches")) == (1, 1 + day.follower.batches)
    assert s.one("kvtier_events_blocks") == day.follower.blocks
    for name in ("replays", "dumps", "lost"):
        assert s.one(f"kvtier_events_{name}") == 0

    found = [block for block in day.script.session.inspect(day.theirs) if block]
    held = Counter(tier for block in found for tier in block["tiers"])
    slot = slot_nbytes(day.codecs["raw"] // 2)
    used = s.all("kvtier_tenant_used_bytes")
    assert used == {("red", tier): held[tier] * slot for tier in ("gpu", "cpu", "nvme")}
    assert s.one("kvtier_pins") == 2
    assert s.all("kvtier_pinned_bytes") == {("cpu",): 2 * slot}
    assert s.all("kvtier_tenant_pinned_bytes") == {("red",): 2 * slot}
    assert s.all("kvtier_tenant_sessions") == {("red",): 1}
    assert {key: count for key, count in s.all("kvtier_tenant_refused").items() if count} == {("red", "cpu"): 1}
