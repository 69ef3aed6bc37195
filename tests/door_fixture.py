"""Doors for tests: one in a thread of this process, one in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.hierarchy.cache import Hierarchy
from kvtier_services.gateway.control import Door

SHARED = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
ROOT = Path(__file__).parent.parent


@contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """A socket's path and an arena's folder; pytest's own paths are too long for a socket."""
    run = Path(tempfile.mkdtemp(prefix="kvt"))
    arena = Path(tempfile.mkdtemp(prefix="kvt-arena-", dir=SHARED))
    try:
        yield run / "door.sock", arena
    finally:
        shutil.rmtree(run)
        shutil.rmtree(arena)


class Loop:
    """An asyncio loop on a thread of its own, to run doors in."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    def close(self) -> None:
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def door_in_thread(hierarchy: Hierarchy, socket: Path) -> Iterator[Door]:
    loop = Loop()
    door = Door(hierarchy, socket, node="kit")
    loop.run(door.start())
    try:
        yield door
    finally:
        loop.run(door.stop(0.2))
        loop.close()


class Child:
    """A process that runs `tests.door_child` and says in JSON lines how far it is."""

    def __init__(self, *args: str) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "services")])}
        command = [sys.executable, "-m", "tests.door_child", *args]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, cwd=ROOT, text=True)

    def says(self):
        line = self._process.stdout.readline()
        assert line, f"the child ended with {self._process.wait(5.0)}"
        return json.loads(line)

    def signal(self, number: int) -> None:
        if number == signal.SIGSTOP:
            stop(self._process)
        else:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10.0)
        self._process.stdout.close()


def stop(process: subprocess.Popen) -> None:
    """Stop a child; when this returns, none of its threads runs."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
