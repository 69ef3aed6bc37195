"""Minutes of mixed load from four engines, two of them killed and replaced every few seconds: all that is loaded is
right, and at the end nothing is held, open or grown.

KVTIER_SOAK_SECONDS says how long; `make soak` takes 10 minutes.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import kvtier
from kvtier.block import slot_nbytes
from tests.cluster.engines import LOADING, SAVING, Engine, Shelf, shelves, starting
from tests.cluster.kit import Cluster, within

SECONDS = float(os.environ.get("KVTIER_SOAK_SECONDS", "120"))
STOPPED = 0.25
"""Part of the engines that are stopped (SIGSTOP) for a while before they are killed."""
GROWTH = 0.02
SLACK = 2 << 20
"""What a process may have grown between the middle of a run and its end: a part of it, and bytes. Allocators and Ray's
buffers of events are still filling then, by 1 to 2 MB; one kilobyte lost a block would be tens of them."""
NVME = 128 << 20


class Watch:
    """The processes of a running kvtier: what memory is their own, and what they have open."""

    def __init__(self, cluster: Cluster) -> None:
        status = cluster.status()
        (host,) = status["hosts"]
        self.pids = {"cpu": host["pid"], "controller": status["controller"]["pid"]}
        self.pids |= {hand["tier"]: hand["pid"] for hand in host["hands"]}
        self.grown: list[dict[str, int]] = []
        self.most_on_disk = 0
        self._nvme_dir = cluster.nvme_dir

    def look(self) -> None:
        """Take a sample."""
        self.grown.append({name: private_nbytes(pid) for name, pid in self.pids.items()})
        on_disk = sum(path.stat().st_blocks * 512 for path in self._nvme_dir.rglob("*"))
        self.most_on_disk = max(self.most_on_disk, on_disk + self._nvme_dir.stat().st_blocks * 512)

    def open_files(self) -> dict[str, int]:
        """How many file descriptors each process has."""
        return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in self.pids.items()}

    def median(self, begin: float, end: float) -> dict[str, float]:
        """Median memory of each process in a part of the run."""
        part = self.grown[int(begin * len(self.grown)) : int(end * len(self.grown))]
        return {name: statistics.median(sample[name] for sample in part) for name in self.pids}


def private_nbytes(pid: int) -> int:
    """Memory of a process that is not a file's, and so not the arena's."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def nothing_is_held(cache: kvtier.Cache, on_shelf: list[Shelf]) -> bool:
    """No lease, reservation, quarantine or flight; the CPU tier's bytes are exactly those of the blocks it has."""
    status = cache.status()
    cpu = next(tier for tier in status["tiers"] if tier["tier"] == "cpu")
    held = status["leases"], status["reservations"], status["staging"], cpu["counters"]["quarantined"]
    here = {
        key: slot_nbytes(block["nbytes"])
        for shelf in on_shelf
        for chain in shelf.everything()
        for key, block in zip(chain.addresses, shelf.space.inspect(chain), strict=True)
        if block and "cpu" in block["tiers"]
    }
    return held == (0, 0, 0, 0) and (cpu["blocks"], cpu["used"]) == (len(here), sum(here.values()))


class Reaper:
    """Kills one of two engines after the other, and starts another in its place.

    Attributes:
        engines: those that live.
        deaths: how many died, by what they were doing.
    """

    def __init__(self, start: Callable[[], Engine], chance: random.Random) -> None:
        self._start, self._chance = start, chance
        self.engines = [start(), start()]
        self.deaths: Counter[int] = Counter()

    def strike(self) -> None:
        """Kill one of them, now or in the middle of something; some are stopped before, and some of these wake up."""
        place = self._chance.randrange(len(self.engines))
        engine, wanted = self.engines[place], self._chance.choice((None, LOADING, SAVING))
        until = time.monotonic() + 1.0
        while wanted not in (None, engine.doing) and time.monotonic() < until:
            time.sleep(0.001)
        if self._chance.random() < STOPPED:
            engine.signal(signal.SIGSTOP)
            time.sleep(self._chance.uniform(0.2, 3.0))
            if self._chance.random() < 0.5:
                engine.signal(signal.SIGCONT)
                return
        engine.kill()
        self.deaths[engine.doing] += 1
        self.engines[place] = self._start()


@pytest.mark.slow
def test_a_host_stays_sound_under_engines_that_die(cluster: Cluster, tmp_path: Path):
    cluster.cli("up")
    watch, chance = Watch(cluster), random.Random(1)
    with kvtier.connect(cluster.socket) as cache, starting(cluster.socket, tmp_path) as start:
        on_shelf = shelves(cache)
        cache.status()
        files = watch.open_files()
        lasting, mortal = [start(), start()], Reaper(start, chance)
        end, strike = time.monotonic() + SECONDS, time.monotonic() + 5.0
        while time.monotonic() < end:
            if time.monotonic() > strike:
                mortal.strike()
                strike = time.monotonic() + chance.uniform(0.5, 4.0)
            watch.look()
            time.sleep(0.25)
        did = sum((engine.end() for engine in [*lasting, *mortal.engines]), Counter())
        within(30.0, lambda: nothing_is_held(cache, on_shelf))
        status = cache.status()
        assert status["sessions"] == 1
        within(10.0, lambda: len(list((cluster.arena_dir / "clients").iterdir())) == 1)
        within(10.0, lambda: all(now <= files[name] for name, now in watch.open_files().items()))
    middle, last = watch.median(0.4, 0.6), watch.median(0.8, 1.0)
    assert not {name: (middle[name], last[name]) for name in last if last[name] > middle[name] * (1 + GROWTH) + SLACK}
    assert watch.most_on_disk <= NVME
    assert Watch(cluster).pids == watch.pids, "a process of the host died"

    nvme = next(tier for tier in status["tiers"] if tier["tier"] == "nvme")
    assert not {"corrupt", "read_error", "write_error"} & nvme["counters"].keys()
    assert not {"keeper_error", "mover_error", "staging_error", "bad_commit"} & status["faults"].keys()
    assert not {"client_bad_header", "client_bad_checksum"} & did.keys()
    assert {"gpu", "cpu", "nvme"} <= status["hits"].keys()
    assert min(did["loaded"], did["saved"]) > SECONDS
    assert nvme["counters"]["evicted"] > 0
    assert mortal.deaths[LOADING]
    assert mortal.deaths[SAVING]
    assert mortal.deaths.total() > SECONDS / 10
