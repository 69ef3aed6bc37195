"""`kvtier up` and `down`, next to a Ray of somebody else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.client.door import DoorSession
from kvtier.testing.session import save
from kvtier_services.cluster import process, state
from kvtier_services.cluster.process import Process
from kvtier_services.cluster.state import Running
from tests.cluster.foreign import ForeignRay, foreign_ray
from tests.cluster.kit import Cluster, blocks_read, environment, within

LEFT_IN_RUN_DIR = {"up.lock", "redis.lock"}


@pytest.fixture(scope="module")
def foreign() -> Iterator[ForeignRay]:
    with foreign_ray() as made:
        yield made


def temporary_ray_folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("kvtier-ray-*")}


def nothing_is_left(cluster: Cluster, run: str) -> None:
    assert process.marked("KVTIER_RUN", run) == []
    assert not cluster.arena_dir.exists()
    assert {path.name for path in cluster.run_dir.iterdir()} <= LEFT_IN_RUN_DIR
    assert (cluster.nvme_dir / "regions").exists()


def remains(cluster: Cluster) -> None:
    """What a kvtier leaves that ended without `down`, its pid taken by another process meanwhile."""
    cluster.run_dir.mkdir(mode=0o700)
    cluster.arena_dir.mkdir()
    (cluster.arena_dir / "arena").write_bytes(b"old")
    cluster.socket.touch()
    reused = Process(os.getpid(), "another boot/1")
    state.write(
        cluster.run_dir / "state.json",
        Running(
            state.VERSION, "0" * 16, time.time(), False, reused, "", str(cluster.socket), str(cluster.arena_dir),
            redis=True, address="127.0.0.1:1", head=reused, ray_token=str(cluster.run_dir / "ray.token"),
        ),
    )  # fmt: skip


def test_up_status_down_next_to_a_foreign_ray(cluster, foreign):
    before = temporary_ray_folders()
    remains(cluster)
    said = cluster.cli("up")
    assert "a kvtier that ended without `kvtier down` was cleaned up" in said
    assert "kvtier is up after" in said
    assert "gpu(host) 16.0 MiB, cpu 64.0 MiB, nvme 128.0 MiB" in said

    known = state.read(cluster.run_dir / "state.json")
    assert all(path.stat().st_mode & 0o077 == 0 for path in cluster.run_dir.iterdir() if path.suffix != ".log")
    assert "kvtier already runs" in cluster.cli("up")
    assert state.read(cluster.run_dir / "state.json") == known
    written = cluster.config.read_text()
    cluster.config.write_text(written.replace('"64MiB"', '"65MiB"') + "[client]\ncall_timeout = '2s'\n")
    said = cluster.cli("up")
    assert "has changed since it was started: client.call_timeout (unset -> 2s), cpu.capacity (64MiB -> 65MiB)" in said
    cluster.config.write_text(written)

    shown = cluster.cli("status")
    assert all(word in shown for word in ("gpu(host)", "cpu", "nvme", "hit ratio", "index redis ok", "controller pid"))
    snapshot = cluster.status()
    (host,) = snapshot["hosts"]
    assert host["serving"]
    assert (host["fault"], host["health"], snapshot["here"]) == ("", "ok", host["host"])
    assert snapshot["ray"] == {"address": known.address, "own": True, "pid": known.head.pid}
    with urllib.request.urlopen(host["metrics"]["url"], timeout=5) as answer:
        capacity = f'kvtier_tier_capacity_bytes{{host="{host["host"]}",tier="gpu"}} 1.6777216e+07'
        assert capacity in answer.read().decode()

    session = DoorSession(cluster.socket)
    assert save(session, 0, 5) == 5
    session.close()

    said = cluster.cli("down")
    assert "kvtier is down after" in said
    assert "5 blocks written down to NVMe" in said
    nothing_is_left(cluster, known.run)
    assert temporary_ray_folders() == before
    assert "kvtier does not run" in cluster.cli("down")
    assert "kvtier does not run" in cluster.cli("status", rc=1)
    assert foreign.head.alive()


def test_up_in_a_ray_of_the_users(cluster, foreign):
    cluster.nvme_dir.mkdir()
    said = cluster.cli("up", "--address", foreign.address, **foreign.env)
    assert "kvtier is up after" in said
    known = state.read(cluster.run_dir / "state.json")
    assert not known.own_ray
    assert cluster.status(**foreign.env)["ray"]["own"] is False
    workers = {child.pid for child in foreign.head.tree()}
    session = DoorSession(cluster.socket)
    assert save(session, 0, 5) == 5
    assert blocks_read(session, 0, 5) == 5
    session.close()
    host = cluster.status(**foreign.env)["hosts"][0]
    assert {host["pid"], *(hand["pid"] for hand in host["hands"])} <= workers
    assert "5 blocks written down" in cluster.cli("down", **foreign.env)
    nothing_is_left(cluster, known.run)
    assert foreign.head.alive()
    within(
        10.0, lambda: not {host["pid"], *(hand["pid"] for hand in host["hands"])} & {c.pid for c in foreign.head.tree()}
    )


def test_only_nodes_with_the_labels_that_are_asked_for(cluster, foreign):
    cluster.config.write_text(cluster.config.read_text() + '[ray]\nlabels = "zone=a"\n')
    said = cluster.cli("up", "--address", foreign.address, rc=1, **foreign.env)
    assert "no live node with the labels zone=a; see ray.labels" in said
    assert {path.name for path in cluster.run_dir.iterdir()} <= LEFT_IN_RUN_DIR


def test_what_is_left_of_a_kvtier_is_removed_by_down(cluster):
    remains(cluster)
    assert "kvtier had ended by itself; what it left was removed" in cluster.cli("down")
    assert not cluster.arena_dir.exists()
    assert {path.name for path in cluster.run_dir.iterdir()} <= LEFT_IN_RUN_DIR


def test_an_up_that_is_cut_short_is_ended_by_down(cluster):
    up = subprocess.Popen(cluster.command("up"), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    file = cluster.run_dir / "state.json"
    known = within(60.0, lambda: file.exists() and (now := state.read(file)).head and now, every=0.02)
    up.kill()
    up.wait(10.0)
    cluster.cli("down")
    assert process.marked("KVTIER_RUN", known.run) == []
    assert {path.name for path in cluster.run_dir.iterdir()} <= LEFT_IN_RUN_DIR


def test_a_cpu_tier_that_hangs_is_ended_by_down(cluster):
    cluster.cli("up")
    known = state.read(cluster.run_dir / "state.json")
    os.kill(cluster.host()["pid"], signal.SIGSTOP)
    began = time.monotonic()
    assert "kvtier is down after" in cluster.cli("down", "--flush", "0")
    assert time.monotonic() - began < 60.0, "the time that an answer may take, and that of the processes' end"
    nothing_is_left(cluster, known.run)


def test_an_arena_that_does_not_fit_is_said_and_nothing_is_left(cluster):
    cluster.config.write_text(cluster.config.read_text().replace('"64MiB"', '"900TiB"'))
    said = cluster.cli("up", rc=1)
    assert "the arena needs" in said
    assert "set cpu.capacity to at most" in said
    assert not cluster.arena_dir.exists()
    assert {path.name for path in cluster.run_dir.iterdir()} <= LEFT_IN_RUN_DIR


def test_a_busy_ray_port_is_said_at_once(cluster):
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        cluster.config.write_text(cluster.config.read_text() + f"[ray]\nport = {port}\n")
        assert f"ray.port {port} is in use" in cluster.cli("up", rc=1)
    assert {path.name for path in cluster.run_dir.iterdir()} <= LEFT_IN_RUN_DIR
