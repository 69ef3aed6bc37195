"""The door of one host: a grpc.aio server on a Unix socket."""

from __future__ import annotations

import asyncio
import logging
import os
import socket as sockets
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from platform import node as hostname

from grpc import aio

from kvtier.config.schema import SOCKET_PATH_LIMIT
from kvtier.errors import ConfigError
from kvtier.hierarchy.cache import Hierarchy
from kvtier.memory.arena import CLIENTS
from kvtier.memory.lock import is_free
from kvtier.rpc.kvtier_pb2_grpc import add_DoorServicer_to_server
from kvtier.rpc.protocol import MAX_MESSAGE, client_lock
from kvtier_services.gateway.calls import Calls, Tally
from kvtier_services.gateway.gates import LocalGate

_log = logging.getLogger(__name__)

SWEEP = 1.0
"""Seconds between looks for lock files of dead clients."""
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.so_reuseport", 0),
)


class Door:
    """Control of one hierarchy for the engines of this host. Belongs to one asyncio loop.

    Args:
        hierarchy: what is asked; its arena must be in a folder.
        socket: where to listen.
        node: the host's name.
        mode: of the socket; 0o660 lets a group in.
        group: number of that group; the process's own when not given.
        salt: of the keys of this host's engines; empty for none.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        socket: Path,
        *,
        node: str = "",
        mode: int = 0o600,
        group: int | None = None,
        salt: bytes = b"",
    ) -> None:
        if hierarchy.arena.folder is None:
            raise ConfigError("a door needs an arena that other processes can map; give it a folder")
        self._folder = hierarchy.arena.folder
        self._socket = socket.absolute()
        self._mode, self._group = mode, group
        self._gate = LocalGate(self._folder, salt)
        self._calls = Calls(hierarchy, node or hostname(), self._gate)
        self._server: aio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def tally(self) -> Tally:
        """What came through."""
        return self._calls.tally

    @property
    def calls(self) -> Counter[str]:
        """How often each call was made."""
        return self._calls.tally.calls

    def remote(self) -> None:
        """There is no door for clients of other hosts here."""
        return

    async def start(self) -> None:
        """Open it.

        Raises:
            ConfigError: the socket cannot be, or another process listens there.
        """
        _clear(self._socket)
        server = aio.server(options=OPTIONS)
        add_DoorServicer_to_server(self._calls, server)
        before = os.umask(0o777 & ~self._mode)
        try:
            server.add_insecure_port(f"unix:{self._socket}")
        except RuntimeError as exc:
            raise ConfigError(f"cannot listen on {self._socket}: {exc}; set run_dir to a folder of yours") from exc
        finally:
            os.umask(before)
        if self._group is not None:
            os.chown(self._socket, -1, self._group)
        await server.start()
        self._server = server
        locks = (file.stem for file in (self._folder / CLIENTS).glob("*.lock"))
        self._gate.gone.update(int(name) for name in locks if name.isdecimal())
        self._sweeper = asyncio.create_task(self._sweep())
        _log.info("door open socket=%s", self._socket)

    async def stop(self, grace: float = 1.0) -> None:
        """Close it: sessions end at once, calls under way may take `grace` seconds; idempotent."""
        if self._server is None or self._sweeper is None:
            return
        server, self._server = self._server, None
        self._sweeper.cancel()
        self._calls.hang_up()
        await server.stop(grace)
        self._socket.unlink(missing_ok=True)
        _log.info("door closed socket=%s", self._socket)

    async def _sweep(self) -> None:
        """Remove the lock files of clients that died."""
        gone, is_gone = self._gate.gone, writer_gone(self._folder)
        while True:
            gone.difference_update([session for session in gone if is_gone(session)])
            await asyncio.sleep(SWEEP)


def writer_gone(folder: Path) -> Callable[[int], bool]:
    """For `Hierarchy`: whether a cut-off session's process has let go of its lock in the arena's `folder`.

    The lock's file is removed then.
    """

    def is_gone(session: int) -> bool:
        path = client_lock(folder, session)
        if not is_free(path):
            return False
        path.unlink(missing_ok=True)
        return True

    return is_gone


def _clear(socket: Path) -> None:
    """Remove the socket that a dead owner left."""
    size = len(os.fsencode(socket))
    if size > SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"{socket} has {size} bytes; a socket's path has at most {SOCKET_PATH_LIMIT}: set run_dir to a shorter one"
        )
    try:
        kind = socket.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise ConfigError(f"{socket} exists and is not a socket; remove it, or set run_dir to another folder")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_NONBLOCK) as probe:
        if probe.connect_ex(os.fsencode(socket)) == 0:
            raise ConfigError(
                f"another process listens on {socket}: stop it with `kvtier down`, or set another run_dir"
            )
    socket.unlink(missing_ok=True)
