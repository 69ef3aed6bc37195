"""What runs in the other processes of `tests/integration/test_door.py`.

host SOCKET ARENA       a door over an arena, with a tier in memory that plays NVMe; until it is killed
engine SOCKET FIRST     a client that holds a lease on blocks 0 to 2 and reserves 4 slots from FIRST on, then waits
                        for a line, goes on writing into them, and commits
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from kvtier.client.door import DoorSession
from kvtier.memory.arena import Arena
from kvtier.testing.session import CAPACITY, chain, host_over, reserve, states
from kvtier_services.gateway.control import Door, writer_gone


def say(**what) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def serve(socket: Path, folder: Path, capacity: int) -> None:
    with host_over(Arena.own(folder, capacity), writer_gone(folder)) as host:
        door = Door(host.hierarchy, socket, node="child")
        await door.start()
        say(pid=os.getpid(), epoch=host.hierarchy.arena.epoch)
        await asyncio.Event().wait()


def engine(socket: Path, first: int) -> None:
    session = DoorSession(socket)
    matched = session.match(chain(0, 3), 0.0)
    with session.writing():
        reserved = reserve(session, first, 4)
        say(leased=len(matched.slots), granted=states(reserved))
        signal.pause()


if __name__ == "__main__":
    kind, where, what = sys.argv[1:4]
    if kind == "host":
        asyncio.run(serve(Path(where), Path(what), int(sys.argv[4]) if sys.argv[4:] else CAPACITY))
    else:
        engine(Path(where), int(what))
