"""A host without Ray: arena, hierarchy and door in a process of their own, for what a client pays.

with host(3 << 30) as socket:
    cache = kvtier.connect(socket)
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def host(capacity: int) -> Iterator[Path]:
    """Run a host with a CPU tier of this size; the path of its socket."""
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as run,
        tempfile.TemporaryDirectory(
            prefix="kvtier-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
        ) as shared,
    ):
        socket = Path(run) / "door.sock"
        command = [sys.executable, "-m", "benchmarks._host", str(socket), shared, str(capacity)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            if process.stdout is None or process.stdout.readline() != b"ready\n":
                raise RuntimeError("the host did not start; its message is above")
            yield socket
        finally:
            process.communicate()


async def _serve(socket: Path, folder: Path, capacity: int) -> None:
    from kvtier.hierarchy.cache import Hierarchy
    from kvtier.index.local import LocalIndex, LocalStore
    from kvtier.memory.arena import Arena
    from kvtier_services.gateway.control import Door

    store = LocalStore()
    hierarchy = Hierarchy(Arena.own(folder, capacity), {}, LocalIndex(store, store.register("bench")))
    door = Door(hierarchy, socket)
    await door.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await door.stop(0)
    hierarchy.close()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
