"""Connections of this process that a library holds and will not let go."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

_PEER = re.compile(r"ipv[46]:(?P<host>.*):(?P<port>\d+)")
OWN = Path("/proc/self/fd")
MOST_FILES = 1 << 20


def hang_up(peer: str, port: int) -> int:
    """Shut the connections between a port of this process and a peer; how many there were.

    Flight's server neither pings its clients nor ends a call that waits for one that stopped reading. A connection that
    is shut ends its calls, and with them what they hold.

    Args:
        peer: as gRPC names it, "ipv4:ADDRESS:PORT".
        port: of this process.
    """
    wanted = _address(peer)
    return sum(_shut(one) for one, address in _connections(port) if address == wanted)


def thin_out(port: int, used: Iterable[str], most: int) -> int:
    """Shut connections to a port of this process that nobody uses, if there are more than `most`; how many were shut.

    Flight's server lets in as many as the process may have open files.

    Args:
        port: of this process.
        used: peers whose connections stay, as gRPC names them.
        most: connections that there may be.
    """
    if len(_files()) <= most:
        return 0
    keep = {_address(peer) for peer in used}
    if sum(1 for _ in _connections(port)) <= most:
        return 0
    return sum(_shut(one) for one, address in _connections(port) if address not in keep)


Address = tuple[str, int]


def _connections(port: int) -> Iterator[tuple[socket.socket, Address]]:
    """The connections to a port of this process, with their peers; each socket is good until the next is asked for."""
    for fd in _files():
        with suppress(OSError), _borrowed(fd) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                host, number = one.getpeername()[:2]
                if one.getsockname()[1] == port:
                    yield one, (host.removeprefix("::ffff:"), number)


def _files() -> Sequence[int]:
    """Numbers of files that may be open; all that could be where not even a folder can be read any more."""
    try:
        return [int(name) for name in os.listdir(OWN)]
    except FileNotFoundError:
        return ()
    except OSError:
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MOST_FILES))


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket of another owner, which stays open. It is never set to block or not to: that is its owner's.

    Raises:
        OSError: it is no socket.
    """
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise OSError(errno.ENOTSOCK, "not a socket")
    try:
        one = socket.socket(fileno=os.dup(fd))
    except OSError as exc:
        if exc.errno != errno.EMFILE:
            raise
        one = socket.socket(fileno=fd)
        try:
            yield one
        finally:
            one.detach()
        return
    with one:
        yield one


def _address(peer: str) -> Address | None:
    known = _PEER.fullmatch(unquote(peer))
    return (known["host"].strip("[]").removeprefix("::ffff:"), int(known["port"])) if known is not None else None


def _shut(one: socket.socket) -> bool:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
        return True
    return False
