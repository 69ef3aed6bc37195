"""A real kvtier, started by its own command line in folders of its own, and an engine that uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtier.block import PAGE, verify_payload
from kvtier.client.door import DoorSession
from kvtier.errors import DeadlineExceeded, SessionUnavailable
from kvtier.testing.payloads import key_of
from kvtier.testing.session import chain, save

ROOT = Path(__file__).parents[2]
SHARED = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
CONFIG = """
run_dir = "{run}"
arena_dir = "{arena}"
[cpu]
capacity = "64MiB"
[nvme]
capacity = "128MiB"
path = "{nvme}"
[gpu]
capacity = "16MiB"
device = "cpu"
[metrics]
port = 0
[status]
port = 0
"""


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "KVTIER_", "XDG_"))}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "services")]), "COLUMNS": "200"} | more


class Cluster:
    """Folders, a kvtier.toml, and the command line."""

    def __init__(self, folder: Path, arena: Path) -> None:
        self.run_dir, self.arena_dir, self.nvme_dir = folder / "run", arena / "arena", folder / "nvme"
        self.config = folder / "kvtier.toml"
        self.config.write_text(CONFIG.format(run=self.run_dir, arena=self.arena_dir, nvme=self.nvme_dir))
        self.socket = self.run_dir / "door.sock"

    def command(self, command: str, *args: str) -> list[str]:
        return [sys.executable, "-m", "kvtier_services.cli", command, "--config", str(self.config), *args]

    def cli(self, command: str, *args: str, rc: int = 0, **env: str) -> str:
        """Output of `kvtier COMMAND`."""
        done = subprocess.run(
            self.command(command, *args),
            env=environment(**env),
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == rc, said
        assert "Traceback" not in said, said
        return said

    def status(self, **env: str) -> dict:
        return json.loads(self.cli("status", "--json", **env))

    def host(self) -> dict:
        (host,) = self.status()["hosts"]
        return host


def within(seconds: float, check: Callable[[], object], every: float = 0.2) -> object:
    """Poll until `check` gives something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (got := check()):
        assert time.monotonic() < deadline, f"not in {seconds} s: {check}"
        time.sleep(every)
    return got


@contextmanager
def cluster_in_temporary_folders() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="kvt"))  # pytest's own paths are too long for a socket
    arena = Path(tempfile.mkdtemp(prefix="kvt-arena-", dir=SHARED))
    cluster = Cluster(folder, arena)
    try:
        yield cluster
    finally:
        try:
            cluster.cli("down", "--flush", "0")
        finally:
            shutil.rmtree(folder)
            shutil.rmtree(arena)


def blocks_read(session: DoorSession, first: int, count: int, wait: float = 2.0) -> int:
    """Blocks of a chain that were leased, copied, and still the leased ones after the copy; their bytes are right."""
    matched = session.match(chain(first, count), wait)
    try:
        for i, slot in enumerate(matched.slots):
            offset, nbytes = int(slot["offset"]), int(slot["nbytes"])
            payload = np.array(session.readable()[offset : offset + nbytes])
            if session.generations()[offset // PAGE] != slot["generation"]:
                return i
            verify_payload(payload.data, expected=key_of(first + i))
        return len(matched.slots)
    finally:
        session.release(matched.lease)


class Traffic:
    """An engine that reads a chain and saves new ones, over and over; it takes misses, refusals and an absent host, and
    nothing else."""

    SAVED = 2
    """Blocks of each new chain."""

    def __init__(self, socket: Path, first: int, count: int) -> None:
        self.hits = self.misses = self.absent = self.saves = 0
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(socket, first, count))

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def _run(self, socket: Path, first: int, count: int) -> None:
        try:
            session = DoorSession(socket)
            while not self._stop.is_set():
                try:
                    got = blocks_read(session, first, count, wait=0.2)
                    new = 1_000_000 * (first + 1) + self.SAVED * self.saves
                    self.saves += save(session, new, self.SAVED) == self.SAVED
                except (SessionUnavailable, DeadlineExceeded):
                    self.absent += 1
                    time.sleep(0.02)
                else:
                    self.hits += got == count
                    self.misses += got < count
            session.close()
        except BaseException as exc:  # noqa: BLE001 - shown in the test's own thread
            self.failure = exc
