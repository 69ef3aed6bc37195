"""What runs in the other processes of `tests/integration/test_remote.py`.

client URL TOKEN FIRST          leases blocks 0 to 2, reserves 4 slots from FIRST on, and waits
host SOCKET ARENA RUN ADDRESS   a host with both doors, the remote one in plain text at ADDRESS; until it is killed
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

from kvtier.client.credentials import Credentials
from kvtier.client.door import DoorSession
from kvtier.client.remote import RemoteWay
from kvtier.memory.arena import Arena
from kvtier.testing.session import CAPACITY, chain, holds, host_over, reserve, save, states
from kvtier_services.gateway import tokens
from kvtier_services.gateway.control import Door, writer_gone
from kvtier_services.gateway.register import Register
from kvtier_services.gateway.remote import Listen, RemoteDoor


def say(**what) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def client(url: str, token: str, first: int) -> None:
    session = DoorSession(RemoteWay(url, Credentials.of(token, tls=False), insecure=True))
    matched = session.match(chain(0, 3), 0.0)
    whole = holds(session, matched, 0)
    with session.writing():
        reserved = reserve(session, first, 4)
        say(whole=whole, granted=states(reserved))
        signal.pause()


async def serve(socket: Path, arena: Path, run: Path, address: str) -> None:
    with host_over(Arena.own(arena, CAPACITY), writer_gone(arena)) as host:
        door = Door(host.hierarchy, socket)
        await door.start()
        token = tokens.add(run / "tokens.json", "kit", admin=True)
        listen = Listen(address, 0, insecure=True)
        side = RemoteDoor(host.hierarchy, listen, Register(run / "tokens.json"), run / "audit.log")
        await side.start()
        session = await asyncio.to_thread(DoorSession, socket)
        await asyncio.to_thread(save, session, 0, 3)
        await asyncio.to_thread(session.close)
        say(port=side.port, token=token)
        await asyncio.Event().wait()


if __name__ == "__main__":
    kind, *args = sys.argv[1:]
    if kind == "client":
        client(args[0], args[1], int(args[2]))
    else:
        asyncio.run(serve(Path(args[0]), Path(args[1]), Path(args[2]), args[3]))
