"""The state file: what `kvtier up` started."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kvtier.errors import ConfigError
from kvtier_services.cluster.process import Process

VERSION = 1


class Running(msgspec.Struct, frozen=True):
    """What `up` started, or is starting.

    Attributes:
        version: of this file's format.
        run: random name of this run, in the environment of all its processes.
        started: seconds since the epoch.
        starting: `up` has not ended yet, or was cut short.
        up: the process of `up`.
        config: file that was read; empty for the defaults.
        socket: the door.
        arena_dir: folder of the arena.
        redis: whether a Redis server was started.
        redis_url: where it listens.
        address: of the Ray cluster; empty as long as there is none.
        head: the Ray head that was started; None when the cluster is the user's.
        ray_temp: temporary folder of that head.
        ray_token: file of its token; empty when the cluster is the user's.
        ray_storage: where that head keeps what it knows; "memory" for nowhere.
        namespace: Ray namespace of the actors.
        host: this machine's address in the Ray cluster; empty for what Ray finds.
        joined: this host joined another one's kvtier: `head` is what keeps its Ray node running.
        written: what the configuration file said, by section.name.
    """

    version: int
    run: str
    started: float
    starting: bool
    up: Process
    config: str
    socket: str
    arena_dir: str
    redis: bool = False
    redis_url: str = ""
    address: str = ""
    head: Process | None = None
    ray_temp: str = ""
    ray_token: str = ""
    ray_storage: str = "memory"
    namespace: str = ""
    host: str = ""
    joined: bool = False
    written: dict[str, str] = {}

    @property
    def own_ray(self) -> bool:
        """Whether the Ray cluster is kvtier's own."""
        return bool(self.ray_token)


def read(path: Path) -> Running | None:
    """What the state file says; None when there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Running)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as exc:
        raise ConfigError(f"{path.parent} cannot be read: {exc.strerror}; set run_dir to a folder of yours") from exc
    except (OSError, msgspec.MsgspecError) as exc:
        raise ConfigError(
            f"{path} cannot be read ({exc}): look for processes with KVTIER_RUN in their environment, then remove it"
        ) from exc


def write(path: Path, running: Running) -> Running:
    """Replace the state file, whole or not at all; returns what was written."""
    part = path.with_suffix(".part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(running)))
    part.replace(path)
    return running
