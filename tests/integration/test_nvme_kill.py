"""The NVMe tier's process is killed with SIGKILL under load, again and again; and two processes want one folder."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.lossless.method import Method
from kvtier.memory.arena import Arena
from kvtier.testing.payloads import key_of, normal_payload_of
from kvtier.testing.tier import Desk
from kvtier.tiers.nvme import NvmeTier

CAPACITY = 24 << 20
REGION = 3 << 20
SIZES = (192, 20_000, 65_600, 262_272)
PACKED = 1.5
"""How many times as much as its bytes a region holds at most."""
ROUNDS = 6
BATCH = 8

CHILD = textwrap.dedent(
    """
    import sys, threading
    from pathlib import Path
    from kvtier.lossless.method import Method
    from kvtier.memory.arena import Arena
    from kvtier.testing import tier as kit
    from kvtier.testing.payloads import key_of, normal_payload_of
    from kvtier.testing.tier import Desk
    from kvtier.tiers.nvme import NvmeTier, transfer

    folder, capacity, region, first = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    sizes = tuple(map(int, sys.argv[5].split(",")))
    transfer.TRANSFER = 1 << 19
    kit.payload_of = normal_payload_of
    arena = Arena.private(16 << 20)
    tier = NvmeTier(folder, capacity, arena, region_nbytes=region, lossless=Method(int(sys.argv[6])))
    lock = threading.Lock()

    def say(lines):
        with lock:
            sys.stdout.write("".join([f"- {key.hex()}\\n" for key in tier.dropped()] + lines))
            sys.stdout.flush()

    def work(number):
        desk = Desk(tier, arena, number << 22)
        for at in range(first + number * 8, first + 10**6, 16):
            seeds = list(range(at, at + 8))
            nbytes = sizes[at // 8 % len(sizes)]
            say([f"? {seed} {nbytes}\\n" for seed in seeds])
            said = desk.write(seeds, nbytes)
            say([f"+ {seed} {nbytes}\\n" for seed, one in zip(seeds, said) if one])
            desk.read(seeds)

    for number in (0, 1):
        threading.Thread(target=work, args=(number,)).start()
    """
)


def run_and_kill(folder: Path, first: int, seconds: float, method: Method) -> list[str]:
    """Write under load from seed `first` on; what the process said before it was killed, whole lines only."""
    arguments = [str(folder), str(CAPACITY), str(REGION), str(first), ",".join(map(str, SIZES)), str(int(method))]
    with subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        killer = None
        lines: list[str] = []
        for line in child.stdout:
            if killer is None:
                killer = time.monotonic() + seconds
            if time.monotonic() >= killer:
                child.send_signal(signal.SIGKILL)
            lines.append(line)
    assert child.returncode == -signal.SIGKILL
    return [line for line in lines if line.endswith("\n")]


def test_killed_under_load_nothing_is_wrong_or_lost(tmp_path: Path, monkeypatch):
    """Payloads are packed in two of three turns, each time otherwise."""
    monkeypatch.setattr("kvtier.testing.tier.payload_of", normal_payload_of)
    chance = random.Random(1)
    arena = Arena.private(16 << 20)
    tried: dict[bytes, tuple[int, int]] = {}
    held: dict[bytes, int] = {}
    for turn in range(ROUNDS):
        said, dropped = list(held), set()
        for line in run_and_kill(tmp_path, turn * 10**6, chance.uniform(0.05, 0.5), Method(turn % 3)):
            mark, *rest = line.split()
            if mark == "?":
                tried[key_of(int(rest[0]))] = int(rest[0]), int(rest[1])
            elif mark == "+":
                said.append(key_of(int(rest[0])))
            else:
                dropped.add(bytes.fromhex(rest[0]))
        with closing(NvmeTier(tmp_path, CAPACITY, arena, region_nbytes=REGION)) as tier:
            held = tier.inventory().nbytes
            desk = Desk(tier, arena)
            for key, nbytes in held.items():
                seed, size = tried[key]
                assert nbytes == size
                assert desk.read([seed], size) == [True], "claimed, and not whole: a phantom"
        stored = [key for key in said if key not in dropped]
        lost = [place for place, key in enumerate(stored) if key not in held]
        if lost:
            # The two writes under way had evicted these, and died before they could say so: the oldest, and not many.
            first_held = next(place for place, key in enumerate(stored) if key in held)
            assert lost[-1] < first_held + 2 * BATCH
            assert sum(tried[stored[place]][1] for place in lost) <= 3 * REGION * PACKED
        assert len(held) > 50


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
