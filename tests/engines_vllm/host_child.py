"""A host without Ray in a process of its own: SOCKET ARENA NVME CAPACITY

Arena, NVMe log and door are the real ones, and stay where they are when it is killed. It answers commands, a line each:

status    the host's status
demote    all blocks go to NVMe and out of memory; how many
rot       flips bytes of every payload on NVMe, in the file; how many
forget    drops the blocks of all ranks but the first; how many
spoil     flips bytes of every payload in the arena, behind everybody's back; how many
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.block import PAGE, address
from kvtier.hierarchy.cache import Hierarchy
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.tiers.base import TierNumber
from kvtier.tiers.nvme import NvmeTier
from kvtier_services.gateway.control import Door, writer_gone

NVME = 1 << 30
KEY_NBYTES = 32
PATIENCE = 60.0


class Host:
    """What the commands do."""

    def __init__(self, hierarchy: Hierarchy, nvme: NvmeTier) -> None:
        self._hierarchy, self._nvme = hierarchy, nvme

    def status(self) -> Any:
        return self._hierarchy.status()

    def demote(self) -> int:
        return self._hierarchy.move(list(self._hierarchy.state.table.rows), TierNumber.NVME).result(PATIENCE)

    def rot(self) -> int:
        """From the middle of its body on, a frame's header and a payload's are as they were."""
        state = self._nvme._state
        with state.lock:
            found = [state.log.find(key) for key in state.log.inventory().keys]
            path = state.opened.file.path
        with path.open("r+b") as file:
            for entry in found:
                at = entry.offset + PAGE + entry.row.nbytes // 2
                file.seek(at)
                bad = bytes(byte ^ 0x5A for byte in file.read(64))
                file.seek(at)
                file.write(bad)
            file.flush()
            os.fsync(file.fileno())
        return len(found)

    def forget(self) -> int:
        keys = list(self._hierarchy.state.table.rows)
        return self._hierarchy.evict(
            [key for key in keys if key[KEY_NBYTES:] != address(key[:KEY_NBYTES], 0)[KEY_NBYTES:]]
        )

    def spoil(self) -> int:
        """Signs and exponents of the second half of each payload: numbers remain numbers."""
        state = self._hierarchy.state
        with state.lock:
            table = state.table
            rows = [row for row in table.rows.values() if table.has(row, TierNumber.CPU)]
            for row in rows:
                offset, nbytes = int(table.offset[row]), int(table.nbytes[row])
                body = self._hierarchy.arena.memory[offset + nbytes // 2 // 4 * 4 : offset + nbytes // 4 * 4]
                body.view(np.uint16)[1::2] ^= np.uint16(0x8000)
        return len(rows)


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def serve(socket: Path, folder: Path, disk: Path, capacity: int) -> None:
    arena = Arena.own(folder, capacity)
    nvme = NvmeTier(disk, NVME, arena, region_nbytes=32 << 20)
    store = LocalStore()
    tiers = {TierNumber.NVME: nvme}
    hierarchy = Hierarchy(arena, tiers, LocalIndex(store, store.register("host")), writer_gone=writer_gone(folder))
    door = Door(hierarchy, socket, node="host")
    await door.start()
    host = Host(hierarchy, nvme)
    say({"pid": os.getpid()})
    while line := await asyncio.to_thread(sys.stdin.readline):
        say(await asyncio.to_thread(getattr(host, line.strip())))
    await door.stop()
    hierarchy.close()
    arena.close()


if __name__ == "__main__":
    where, arena, disk, capacity = sys.argv[1:]
    asyncio.run(serve(Path(where), Path(arena), Path(disk), int(capacity)))
