"""The metrics of a host whose process is killed: gauges are right again, counters begin anew and count on."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request

from kvtier.block import slot_nbytes
from kvtier.client.door import DoorSession
from kvtier.errors import SessionError
from kvtier.testing.session import NBYTES, chain, save
from kvtier.tiers.base import TierNumber
from tests.cluster.kit import Cluster, within
from tests.truth.host import Scrape

PATIENCE = 40.0
COUNT = 12


def scrape(running: Cluster) -> Scrape | None:
    """Of the host's life of now; None while it does not answer."""
    try:
        return Scrape(running.host()["metrics"]["url"])
    except (OSError, KeyError, TypeError, ValueError, urllib.error.URLError):
        return None


def blocks(running: Cluster) -> dict[str, float]:
    found = scrape(running)
    return found.some("kvtier_tier_blocks") if found else {}


def attached(session: DoorSession) -> bool:
    """Whether the host of now knows the session."""
    try:
        return bool(session.status())
    except SessionError:
        return False


def test_a_host_that_is_killed(running):
    session = DoorSession(running.socket, call_timeout=5.0)
    try:
        assert save(session, 0, COUNT) == COUNT
        assert session.move(chain(0, COUNT), TierNumber.NVME, 10.0) == COUNT
        assert save(session, 100, 3) == 3
        session.release(session.match(chain(100, 5), 0.0).lease, 0.003)
        within(PATIENCE, lambda: blocks(running) == {"gpu": 3, "cpu": 3, "nvme": COUNT})
        first = scrape(running)
        assert first.one("kvtier_stored_blocks") == COUNT + 3
        assert first.some("kvtier_hit_blocks") == {"cpu": 3}
        assert first.some("kvtier_miss_blocks") == {"absent": 2}
        assert first.one("kvtier_sessions") == 1
        held = session.match(chain(100, 3), 0.0)
        assert scrape(running).some("kvtier_leased_bytes") == {"cpu": 3 * slot_nbytes(NBYTES)}

        os.kill(running.host()["pid"], signal.SIGKILL)
        within(
            PATIENCE,
            lambda: (now := scrape(running)) and now.one("kvtier_incarnation") > first.one("kvtier_incarnation"),
        )
        # Memory is gone, the GPU tier's is in another process, and NVMe has what it had.
        within(PATIENCE, lambda: blocks(running) == {"gpu": 3, "nvme": COUNT})
        second = scrape(running)
        assert second.one("kvtier_start_time_seconds") > first.one("kvtier_start_time_seconds")
        assert second.one("kvtier_blocks") == COUNT + 3
        assert (second.some("kvtier_leased_bytes"), second.one("kvtier_leases")) == ({}, 0)
        for name in ("hit_blocks", "miss_blocks", "hit_tokens", "lookups", "dropped_blocks"):
            assert second.some(f"kvtier_{name}") == {}, name
        assert not any(second.all("kvtier_moves").values())
        assert (second.one("kvtier_asked_blocks"), second.one("kvtier_stored_blocks")) == (0, 0)
        assert (second.one("kvtier_window_asked_blocks"), second.one("kvtier_window_distinct_blocks")) == (0, 0)
        assert second.histogram("kvtier_match_seconds")[0] == 0
        assert second.one("kvtier_index_up") == 1

        within(PATIENCE, lambda: attached(session))
        session.release(held.lease)  # of the life before
        matched = session.match(chain(0, COUNT + 1), 5.0)
        assert len(matched.slots) == COUNT
        session.release(matched.lease)
        assert save(session, 200, 2) == 2
        within(PATIENCE, lambda: scrape(running).one("kvtier_stored_blocks") == 2)
        third = scrape(running)
        assert third.one("kvtier_sessions") == 1
        assert third.some("kvtier_hit_blocks") == {"nvme": COUNT}
        assert third.some("kvtier_miss_blocks") == {"absent": 1}
        assert third.some("kvtier_lookups") == {"partial": 1}
        assert third.all("kvtier_moves")["nvme", "cpu"] == COUNT
        assert third.one("kvtier_window_distinct_blocks") == COUNT + 1
        assert third.some("kvtier_tier_blocks")["cpu"] == COUNT + 2
        with urllib.request.urlopen(
            running.host()["metrics"]["url"].replace("/metrics", "/ready"), timeout=5
        ) as answer:
            assert (answer.status, answer.read()) == (200, b"ok\n")
    finally:
        session.close()
