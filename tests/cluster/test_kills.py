"""Processes of a running kvtier are killed under an engine's feet: it sees misses, and hits again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kvtier.block import slot_nbytes
from kvtier.client.door import DoorSession
from kvtier.errors import SessionUnavailable
from kvtier.testing.session import NBYTES, chain, save
from kvtier.tiers.base import TierNumber
from tests.cluster.kit import Cluster, Traffic, blocks_read, within

PATIENCE = 40.0
COUNT = 24


@pytest.fixture
def session(running: Cluster) -> Iterator[DoorSession]:
    made = DoorSession(running.socket, call_timeout=5.0)
    yield made
    made.close()


def hand(running: Cluster, tier: str) -> dict:
    return next(hand for hand in running.host()["hands"] if hand["tier"] == tier)


def tier(status: dict, name: str) -> dict:
    return next(tier for tier in status["tiers"] if tier["tier"] == name)


def nothing_is_held(session: DoorSession, first: int) -> bool:
    """No lease, no reservation, no slot without a block."""
    session.move(chain(first, COUNT), TierNumber.NVME, 10.0)
    status = session.status()
    cpu = tier(status, "cpu")
    return (
        status["leases"] == status["reservations"] == status["staging"] == cpu["counters"]["quarantined"] == 0
        and cpu["used"] == cpu["blocks"] * slot_nbytes(NBYTES)
        and tier(status, "nvme")["blocks"] >= COUNT
    )


def stored_on_nvme(session: DoorSession, first: int) -> None:
    assert save(session, first, COUNT) == COUNT
    assert session.move(chain(first, COUNT), TierNumber.NVME, 10.0) == COUNT


def reads_all(session: DoorSession, first: int) -> bool:
    try:
        return blocks_read(session, first, COUNT) == COUNT
    except SessionUnavailable:
        return False


def test_no_message_carries_payloads(running, session):
    stored_on_nvme(session, 0)
    assert blocks_read(session, 0, COUNT) == COUNT
    assert session.prefetch(chain(0, COUNT), TierNumber.GPU).result(10.0) == COUNT
    assert session.match(chain(1_000_000, 2048), 0.0).lease == 0
    host = running.host()
    keys = {"Match": 2048, "Reserve": COUNT, "Commit": COUNT, "Move": COUNT, "Prefetch": COUNT}
    for way in ("request_nbytes", "reply_nbytes"):
        for call, most in keys.items():
            assert 0 <= host["door"][way].get(call, 0) <= (64 << 10) + 64 * most, (way, call)
    assert {"Match", "Reserve", "Commit"} <= set(host["door"]["calls"])
    overweight = {hand["tier"]: hand["overweight"] for hand in host["hands"]}
    assert {"read", "write"} <= set(overweight["nvme"])
    assert "write" in overweight["gpu"]
    assert max(most for tier in overweight.values() for most in tier.values()) <= 64 << 10


def test_the_nvme_tiers_process(running, session):
    stored_on_nvme(session, 100)
    before = hand(running, "nvme")
    with Traffic(running.socket, 100, COUNT) as traffic:
        within(10.0, lambda: traffic.hits > 3, every=0.02)
        session.move(chain(100, COUNT), TierNumber.NVME, 10.0)
        os.kill(before["pid"], signal.SIGKILL)
        after = within(PATIENCE, lambda: (now := hand(running, "nvme"))["pid"] not in (0, before["pid"]) and now)
        seen = traffic.hits
        within(PATIENCE, lambda: traffic.hits > seen + 3, every=0.02)
    assert after["connected"]
    assert blocks_read(session, 100, COUNT) == COUNT
    within(PATIENCE, lambda: nothing_is_held(session, 100))


def test_the_gpu_tiers_process(running, session):
    stored_on_nvme(session, 200)
    assert session.prefetch(chain(200, COUNT), TierNumber.GPU).result(10.0) == COUNT
    assert save(session, 300, COUNT) == COUNT
    assert session.move(chain(300, COUNT), TierNumber.GPU, 10.0) == COUNT
    before = hand(running, "gpu")
    assert before["label"] == "gpu(host)"
    with Traffic(running.socket, 200, COUNT) as traffic:
        within(10.0, lambda: traffic.hits > 3, every=0.02)
        os.kill(before["pid"], signal.SIGKILL)
        within(PATIENCE, lambda: hand(running, "gpu")["pid"] not in (0, before["pid"]))
        seen = traffic.hits
        within(PATIENCE, lambda: traffic.hits > seen + 3, every=0.02)
    assert blocks_read(session, 300, COUNT) == 0, "what only the GPU had is gone"
    assert session.prefetch(chain(200, COUNT), TierNumber.GPU).result(10.0) == COUNT
    within(PATIENCE, lambda: nothing_is_held(session, 200))


def test_the_cpu_tiers_process(running, session):
    stored_on_nvme(session, 400)
    epoch, before = session.epoch, running.host()
    with Traffic(running.socket, 400, COUNT) as traffic:
        within(10.0, lambda: traffic.hits > 3, every=0.02)
        os.kill(before["pid"], signal.SIGKILL)
        within(PATIENCE, lambda: traffic.absent > 0, every=0.02)
        seen = traffic.hits
        within(PATIENCE, lambda: traffic.hits > seen + 3, every=0.02)
    within(PATIENCE, lambda: reads_all(session, 400))
    assert session.epoch > epoch
    assert save(session, 500, COUNT) == COUNT
    after = running.host()
    assert after["pid"] != before["pid"]
    assert [hand["pid"] for hand in after["hands"]] == [hand["pid"] for hand in before["hands"]]
    within(PATIENCE, lambda: nothing_is_held(session, 400))


def test_the_controller(running, session):
    stored_on_nvme(session, 600)
    before = running.status()["controller"]["pid"]
    with Traffic(running.socket, 600, COUNT) as traffic:
        within(10.0, lambda: traffic.hits > 3, every=0.02)
        os.kill(before, signal.SIGKILL)
        seen, saved = traffic.hits, traffic.saves
        within(5.0, lambda: traffic.hits > seen + 20 and traffic.saves > saved, every=0.02)
        within(PATIENCE, lambda: running.status().get("controller", {}).get("pid") not in (None, before))
    assert traffic.absent == 0
    assert len(running.status()["hosts"]) == 1


def test_redis(running, session):
    stored_on_nvme(session, 700)
    os.kill(running.status()["redis"]["pid"], signal.SIGKILL)
    within(PATIENCE, lambda: not running.status()["redis"]["pid"])
    assert blocks_read(session, 700, COUNT) == COUNT
    assert "Redis is gone" in running.cli("status")
    assert "Redis server was gone and was started again" in running.cli("up")
    within(PATIENCE, lambda: session.status()["index"]["ok"])
