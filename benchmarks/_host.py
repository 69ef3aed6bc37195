"""A host without Ray: arena, hierarchy and door in a process of their own, for what a client pays.

with host(3 << 30) as socket:
    cache = kvtier.connect(socket)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Disk:
    """An NVMe tier for a host: its folder and capacity in bytes."""

    folder: Path
    capacity: int


@contextlib.contextmanager
def host(capacity: int, disk: Disk | None = None, *, high: float = 0.9, low: float = 0.8) -> Iterator[Path]:
    """Run a host with a CPU tier of this size, and an NVMe tier if wanted; the path of its socket.

    Args:
        capacity: bytes of the CPU tier.
        disk: the NVMe tier.
        high: watermark of the CPU tier above which old blocks are moved to NVMe.
        low: watermark at which that ends.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as run,
        tempfile.TemporaryDirectory(
            prefix="kvtier-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
        ) as shared,
    ):
        socket = Path(run) / "door.sock"
        command = [sys.executable, "-m", "benchmarks._host", str(socket), shared, str(capacity), str(high), str(low)]
        command += [str(disk.folder), str(disk.capacity)] if disk else []
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            if process.stdout is None or process.stdout.readline() != b"ready\n":
                raise RuntimeError("the host did not start; its message is above")
            yield socket
        finally:
            process.communicate()


@contextlib.contextmanager
def folder_on_disk() -> Iterator[Path]:
    """A folder for what is measured on a disk: in KVTIER_BENCH_DIR, else in the working directory's `.bench`."""
    root = Path(os.environ.get("KVTIER_BENCH_DIR", ".bench"))
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        if not any(root.iterdir()):
            root.rmdir()


async def _serve(socket: Path, folder: Path, capacity: int, high: float, low: float, disk: Disk | None) -> None:
    from kvtier.hierarchy.cache import Hierarchy, Limits
    from kvtier.index.local import LocalIndex, LocalStore
    from kvtier.memory.arena import Arena
    from kvtier.tiers.base import TierNumber
    from kvtier.tiers.nvme import NvmeTier
    from kvtier_services.gateway.control import Door

    store = LocalStore()
    arena = Arena.own(folder, capacity)
    while arena.ready < arena.capacity:
        await asyncio.sleep(0.02)
    tiers = {TierNumber.NVME: NvmeTier(disk.folder, disk.capacity, arena)} if disk else {}
    limits = Limits.of(capacity, high=high, low=low)
    hierarchy = Hierarchy(arena, tiers, LocalIndex(store, store.register("bench")), limits=limits)
    door = Door(hierarchy, socket)
    await door.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await door.stop(0)
    hierarchy.close()


if __name__ == "__main__":
    _socket, _folder, _capacity, _high, _low, *_disk = sys.argv[1:]
    asyncio.run(
        _serve(
            Path(_socket),
            Path(_folder),
            int(_capacity),
            float(_high),
            float(_low),
            Disk(Path(_disk[0]), int(_disk[1])) if _disk else None,
        )
    )
