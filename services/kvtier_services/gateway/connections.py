"""Connections of this process that a library holds and will not let go."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

_PEER = re.compile(r"ipv[46]:(?P<host>.*):(?P<port>\d+)")
OWN = Path("/proc/self/fd")


def hang_up(peer: str, port: int) -> int:
    """Shut the connections between a port of this process and a peer; how many there were.

    Flight's server neither pings its clients nor ends a call that waits for one that stopped reading. A connection that
    is shut ends its calls, and with them what they hold.

    Args:
        peer: as gRPC names it, "ipv4:ADDRESS:PORT".
        port: of this process.
    """
    known = _PEER.fullmatch(unquote(peer))
    if known is None:
        return 0
    wanted = known["host"].strip("[]").removeprefix("::ffff:"), int(known["port"])
    shut = 0
    for entry in list(OWN.iterdir()) if OWN.exists() else ():
        with suppress(OSError, ValueError):
            if os.readlink(entry).startswith("socket:"):
                shut += _shut(int(entry.name), wanted, port)
    return shut


def _shut(fd: int, peer: tuple[str, int], port: int) -> bool:
    """Shut a socket, if it is that connection's."""
    with socket.socket(fileno=os.dup(fd)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return False
        host, number = one.getpeername()[:2]
        if (host.removeprefix("::ffff:"), number) != peer or one.getsockname()[1] != port:
            return False
        one.shutdown(socket.SHUT_RDWR)
    return True
