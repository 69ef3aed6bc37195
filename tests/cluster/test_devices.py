"""A host with two NVMe devices: when one is away, the other one's are hits; what it has comes back with it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from kvtier.client.door import DoorSession
from kvtier.memory.lock import is_free
from kvtier.testing.payloads import key_of
from kvtier.testing.session import chain, save
from kvtier.tiers.base import TierNumber
from kvtier.tiers.several.homes import Homes
from tests.cluster.kit import Cluster, within

PATIENCE = 40.0
COUNT = 32


@pytest.fixture
def folders(cluster: Cluster) -> list[Path]:
    """Of the two devices of a cluster that is not started yet."""
    made = [cluster.nvme_dir.with_name(name) for name in ("one", "two")]
    use(cluster, made)
    return made


def use(cluster: Cluster, folders: list[Path]) -> None:
    """Name these devices in its kvtier.toml."""
    lines = cluster.config.read_text().splitlines()
    paths = "path = [" + ", ".join(f'"{folder}"' for folder in folders) + "]"
    cluster.config.write_text("\n".join(paths if line.startswith("path = ") else line for line in lines))


def hand(host: dict, folder: Path) -> dict:
    return next(hand for hand in host["hands"] if hand["device"] == str(folder))


def blocks(host: dict) -> dict[str, int]:
    """On each device."""
    nvme = next(tier for tier in host["hierarchy"]["tiers"] if tier["tier"] == "nvme")
    return {device["device"]: device["blocks"] for device in nvme["devices"]}


def on_disk(session: DoorSession, first: int) -> None:
    assert save(session, first, COUNT) == COUNT
    assert session.move(chain(first, COUNT), TierNumber.NVME, 10.0) == COUNT


def is_hit(session: DoorSession, seed: int) -> bool:
    """Whether this block alone is; then it is moved down again."""
    matched = session.match(chain(seed, 1), 10.0)
    session.release(matched.lease)
    session.move(chain(seed, 1), TierNumber.NVME, 10.0)
    return len(matched.slots) == 1


class Reading:
    """An engine that reads blocks one by one, over and over."""

    def __init__(self, socket: Path, seeds: list[int]) -> None:
        self.hits = self.misses = 0
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(socket, seeds))

    def __enter__(self) -> Reading:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60.0)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def _run(self, socket: Path, seeds: list[int]) -> None:
        try:
            session = DoorSession(socket, call_timeout=10.0)
            while not self._stop.is_set():
                for seed in seeds:
                    hit = is_hit(session, seed)
                    self.hits += hit
                    self.misses += not hit
            session.close()
        except BaseException as exc:  # noqa: BLE001 - shown in the test's own thread
            self.failure = exc


@pytest.mark.slow
def test_the_process_of_one_device_dies_under_load(cluster, folders):
    cluster.cli("up")
    homes = Homes(map(str, folders))
    of = {
        folder: [s for s in range(COUNT) if homes.pick(key_of(s), map(str, folders)) == str(folder)]
        for folder in folders
    }
    session = DoorSession(cluster.socket, call_timeout=10.0)
    on_disk(session, 0)
    host = cluster.host()
    assert blocks(host) == {str(folder): len(seeds) for folder, seeds in of.items()}
    before = [hand(host, folder)["pid"] for folder in folders]
    locks = [cluster.arena_dir / "hands" / f"nvme-{number}.lock" for number in (1, 2)]
    assert [int(lock.read_text()) for lock in locks] == before
    with Reading(cluster.socket, of[folders[1]]) as steady, Reading(cluster.socket, of[folders[0]]) as broken:
        within(PATIENCE, lambda: steady.hits and broken.hits, every=0.02)
        os.kill(before[0], signal.SIGKILL)
        within(PATIENCE, lambda: broken.misses, every=0.01)
        on_disk(session, 1000)
        within(PATIENCE, lambda: hand(cluster.host(), folders[0])["pid"] not in (0, before[0]))
        seen = broken.hits
        within(PATIENCE, lambda: broken.hits > seen + len(of[folders[0]]), every=0.02)
        seen = steady.hits
        within(PATIENCE, lambda: steady.hits > seen + len(of[folders[1]]), every=0.02)
    assert steady.misses == 0
    assert all(is_hit(session, seed) for seed in (*range(COUNT), *range(1000, 1000 + COUNT)))
    host = cluster.host()
    assert [hand(host, folder)["connects"] for folder in folders] == [2, 1]
    assert sum(blocks(host).values()) == 2 * COUNT
    shown = cluster.cli("status")
    for folder in folders:
        assert f"{folder} " in shown
        assert f"pid {hand(host, folder)['pid']}" in shown
    session.close()
    cluster.cli("down")
    assert all(not lock.exists() or is_free(lock) for lock in locks)


@pytest.mark.slow
def test_a_device_comes_late_and_the_list_changes(cluster, folders):
    one, two = folders
    two.write_text("no folder")
    assert f"nvme {two}: " in cluster.cli("up")
    session = DoorSession(cluster.socket, call_timeout=10.0)
    on_disk(session, 0)
    assert blocks(cluster.host()) == {str(one): COUNT, str(two): 0}
    two.unlink()
    within(PATIENCE, lambda: hand(cluster.host(), two)["connected"])
    on_disk(session, 1000)
    assert blocks(cluster.host())[str(two)] > 0
    session.close()
    cluster.cli("down")

    three = two.with_name("three")
    use(cluster, [three, two, one])
    cluster.cli("up")
    session = DoorSession(cluster.socket, call_timeout=10.0)
    assert all(is_hit(session, seed) for seed in (*range(COUNT), *range(1000, 1000 + COUNT)))
    assert blocks(cluster.host())[str(three)] == 0
    session.close()
