"""This machine: its name and addresses, and how much memory a process of it may still take."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HOST_ENV = "KVTIER_HOST"
PROC = Path("/proc")
NO_LIMIT = 1 << 60
"""What version 1 of control groups says where there is no limit is about 2**63."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one limit leaves.

    Attributes:
        nbytes: that may still be taken.
        found: what the limit is, for people.
        fix: what raises it.
    """

    nbytes: int
    found: str
    fix: str


def host_name() -> str:
    """Name of this host: $KVTIER_HOST, for several hosts on one machine, else the machine's own."""
    return os.environ.get(HOST_ENV) or socket.gethostname()


def is_loopback(host: str) -> bool:
    """Whether what is sent to this address, or name, does not leave this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def memory(proc: Path = PROC) -> Room:
    """What the tightest limit leaves: memory that the machine has available, or a control group of this process.

    Shared memory is charged to the group of the process that allocates it, and one page beyond a group's limit ends
    with the kernel killing somebody.

    Args:
        proc: where the process file system is.
    """
    import psutil

    available = int(psutil.virtual_memory().available)
    machine = Room(available, f"{mib(available)} of memory are available on this machine", "stop what takes memory")
    return min([machine, *_groups(proc)], key=lambda room: room.nbytes)


def mib(nbytes: int) -> str:
    """Bytes for people, exact enough to compare."""
    return f"{nbytes >> 20:,} MiB"


def _groups(proc: Path) -> Iterator[Room]:
    """The memory limits of this process's control groups and of all that they are in, of both versions."""
    try:
        mounts = [line.split() for line in (proc / "self/mountinfo").read_text().splitlines()]
        groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:  # not Linux
        return
    for number, controllers, path in groups:
        unified = number == "0" and not controllers
        if not unified and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
            if kind == ("cgroup2" if unified else "cgroup") and (unified or "memory" in options):
                yield from _tree(Path(mount[4]), mount[3], path, version=2 if unified else 1)


def _tree(mounted: Path, root: str, path: str, *, version: int) -> Iterator[Room]:
    """Limits from a group up to the top of the mount, which in a container may be the container's own group."""
    group, top = PurePosixPath(path), PurePosixPath(root)
    inside = group.relative_to(top).parts if group.is_relative_to(top) else ()
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    usage, cache = (
        ("memory.current", "inactive_file") if version == 2 else ("memory.usage_in_bytes", "total_inactive_file")
    )
    for depth in range(len(inside), -1, -1):
        folder = mounted.joinpath(*inside[:depth])
        for name in names:
            with suppress(OSError, ValueError):  # "max", or the root, which has no such file
                limit = int((folder / name).read_text())
                if limit < NO_LIMIT:
                    used = int((folder / usage).read_text()) - _stat(folder, cache)
                    left = max(0, limit - used)
                    yield Room(
                        left,
                        f"{mib(left)} are left of the {mib(limit)} that {folder / name} allows",
                        "raise the memory limit of the container or the service",
                    )


def _stat(folder: Path, name: str) -> int:
    """One line of memory.stat: page cache that the kernel gives up before it says that a group is full."""
    lines = (folder / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
