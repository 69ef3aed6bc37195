"""The NVMe tier's process is killed with SIGKILL under load, again and again; and two processes want one folder."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.block import PAGE
from kvtier.errors import ConfigError
from kvtier.lossless.method import Method
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import key_of
from kvtier.testing.tier import on_disk
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.nvme.recovery import FILE
from tests.nvme_child import CAPACITY, REGION, SIZES, payload_of, slots_of

FAULTS = ("", "short", "", "flip", "error", "", "short flip error")
"""What the device does to each round's process."""
LINES = 60
"""What each says at least before it is killed, on however busy a machine."""


def run_and_kill(folder: Path, turn: int, seconds: float, method: Method, faults: str) -> Iterator[list[str]]:
    """Load the tier; what its process said until it was killed, in words."""
    command = [sys.executable, "-m", "tests.nvme_child", str(folder), str(turn), str(int(method)), faults]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        killer = None
        for number, line in enumerate(child.stdout):
            killer = killer or time.monotonic() + seconds
            if number > LINES and time.monotonic() >= killer:
                child.send_signal(signal.SIGKILL)
            if line.endswith("\n"):
                yield line.split()
    assert child.returncode == -signal.SIGKILL


@dataclass
class Oracle:
    """What must be there, what may, and what may not; by seeds, from what the process said in order.

    Attributes:
        must: stored, acknowledged, and not reported as gone or about to go.
        tried: every seed ever written.
        removed: acknowledged as removed for good, and not written since.
        damaged: its bytes were altered behind the tier's back.
    """

    must: set[int] = field(default_factory=set)
    tried: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)
    _gone: set[int] = field(default_factory=set)

    def hear(self, mark: str, seed: int) -> None:
        """One line: ? about to write, + written, - reported as dropped, ! about to be evicted, x about to remove,
        X removed for good, ~ altered on its way to the disk."""
        if mark == "?":
            self.tried.add(seed)
            self.removed.discard(seed)
            self._gone.discard(seed)
        elif mark == "+":
            # Another thread may have told of its eviction before this one told of its writing.
            self.must |= {seed} - self._gone
        elif mark == "X":
            self.removed.add(seed)
        elif mark == "~":
            self.damaged.add(seed)
        if mark in "-!xX":
            self._gone.add(seed)
            self.must.discard(seed)

    def check(self, tier: NvmeTier, arena: Arena, *, loose: bool) -> dict[int, bytes]:
        """Compare with what was found and is whole; with `loose`, records of the tier itself were damaged."""
        inventory = tier.inventory()
        claimed = dict(zip(inventory.records["tokens"].tolist(), inventory.keys, strict=True))
        whole = self._read(tier, arena, inventory.records)
        assert claimed.keys() <= self.tried
        assert loose or not claimed.keys() & self.removed, "removed, and back"
        assert claimed.keys() - whole <= self.damaged, "claimed, and not whole: a phantom"
        lost = self.must - whole - self.damaged
        assert loose or not lost, f"acknowledged, and lost: {sorted(lost)}"
        # Closing would note what is corrupt, and may evict for that.
        tier.remove([claimed[seed] for seed in claimed.keys() - whole])
        gone = set(tier.dropped())
        held = {seed: claimed[seed] for seed in whole if claimed[seed] not in gone}
        self.must, self.damaged, self._gone = set(held), set(), set()
        return held

    @staticmethod
    def _read(tier: NvmeTier, arena: Arena, records) -> set[int]:
        """Which are whole; fails on any wrong byte."""
        whole = set()
        for first in range(0, len(records), 16):
            seeds = records["tokens"][first : first + 16].tolist()
            sizes = records["nbytes"][first : first + 16].tolist()
            slots = slots_of(sizes)
            arena.memory[:] = 0xA5
            found = tier.read([key_of(seed) for seed in seeds], slots)
            for seed, size, offset, one in zip(seeds, sizes, slots.offsets.tolist(), found, strict=True):
                assert not one or arena.payload(offset, size) == payload_of(seed, size), "wrong bytes"
                whole |= {seed} if one else set()
        return whole


def flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)
        file.seek(place)
        file.write(bytes([old[0] ^ 1 << bit]))


@pytest.mark.parametrize(
    ("luck", "rounds"), [(0, 6), *(pytest.param(luck, 25, marks=pytest.mark.slow) for luck in range(1, 5))]
)
def test_killed_under_load_nothing_is_wrong_lost_or_back(tmp_path: Path, luck: int, rounds: int):
    """Nothing that was acknowledged may be lost but for what the log was about to take when it died: it tells that
    before it does it, and only that; and but for single records whose bytes were altered.

    Payloads are packed in one of three rounds. Between some rounds a bit of a payload flips, or one of anything.
    """
    chance = random.Random(luck)
    arena = Arena.private(16 * (SIZES[-1] + PAGE))
    oracle, loose, seen = Oracle(), False, dict.fromkeys("?+-!xX~", 0)
    for turn in range(rounds):
        faults, method = FAULTS[turn % len(FAULTS)], Method(max(0, turn % 6 - 3))
        for mark, seed in run_and_kill(tmp_path, turn, chance.uniform(0.05, 0.5), method, faults):
            seen[mark] += 1
            oracle.hear(mark, int(seed))
        with closing(NvmeTier(tmp_path, CAPACITY, arena, region_nbytes=REGION)) as tier:
            held = oracle.check(tier, arena, loose=loose)
            assert held
            seed = chance.choice(sorted(held))
            place = tier._state.log.find(held[seed]).offset + PAGE + chance.randrange(192)
        assert on_disk(tmp_path) <= CAPACITY
        loose = turn % 9 == 5
        if loose:
            flip(tmp_path / FILE, chance.randrange(PAGE, (tmp_path / FILE).stat().st_size), chance.randrange(8))
            oracle.removed.clear()
            oracle.damaged |= oracle.must
        elif turn % 3 == 1:
            flip(tmp_path / FILE, place, chance.randrange(8))
            oracle.damaged.add(seed)
    assert rounds < 25 or all(seen.values()), seen


def test_the_second_process_on_a_folder_is_refused_with_the_firsts_pid(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("kvtier.memory.lock.PATIENCE", 0.2)
    code = (
        "import sys, pathlib; from kvtier.memory.arena import Arena; from kvtier.tiers.nvme import NvmeTier;"
        "tier = NvmeTier(pathlib.Path(sys.argv[1]), 1 << 20, Arena.private(4096)); print('open', flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=f"running process .pid {child.pid}.*kvtier down"):
            NvmeTier(tmp_path, 1 << 20, Arena.private(4096))
        os.kill(child.pid, signal.SIGKILL)
    NvmeTier(tmp_path, 1 << 20, Arena.private(4096)).close()
