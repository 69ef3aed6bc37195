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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.hierarchy.cache import Hierarchy
    from kvtier_services.gateway.remote import RemoteDoor

REMOTE = "KVTIER_BENCH_REMOTE"


@dataclass(frozen=True)
class Disk:
    """An NVMe tier for a host: its folder and capacity in bytes."""

    folder: Path
    capacity: int


@contextlib.contextmanager
def host(
    capacity: int, disk: Disk | None = None, *, high: float = 0.9, low: float = 0.8, remote: Path | None = None
) -> Iterator[Path]:
    """Run a host with a CPU tier of this size, and an NVMe tier if wanted; the path of its socket.

    Args:
        capacity: bytes of the CPU tier.
        disk: the NVMe tier.
        high: watermark of the CPU tier above which old blocks are moved to NVMe.
        low: watermark at which that ends.
        remote: folder with a `tokens.json` for a door for clients of other hosts, without TLS; its port is written to
            `port` there. With a `host.pem` and a `host.key` there is TLS.
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
        environ = os.environ | ({REMOTE: str(remote)} if remote else {})
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
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


def _remote_door(hierarchy: Hierarchy, folder: Path) -> RemoteDoor:
    from kvtier_services.gateway.register import Register
    from kvtier_services.gateway.remote import Listen, RemoteDoor
    from kvtier_services.gateway.tls import Certificate

    cert, key = folder / "host.pem", folder / "host.key"
    listen = Listen("127.0.0.1", 0, certificate=Certificate(cert, key) if cert.exists() else None)
    return RemoteDoor(hierarchy, listen, Register(folder / "tokens.json"), folder / "audit.log")


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
    side = _remote_door(hierarchy, Path(os.environ[REMOTE])) if REMOTE in os.environ else None
    if side is not None:
        await side.start()
        Path(os.environ[REMOTE], "port").write_text(str(side.port))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    if side is not None:
        await side.stop(0)
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
