"""A host of kvtier, as the tests hold it: started, killed, started again, looked at."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHARED = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
CAPACITY = 256 << 20
PATIENCE = 60.0


def eventually(what: Callable[[], Any], wanted: Any, seconds: float = PATIENCE) -> None:
    """Wait until `what()` is what is wanted; fails with what it is instead."""
    deadline = time.monotonic() + seconds
    while (found := what()) != wanted:
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds:g} s it is {found!r}, not {wanted!r}")
        time.sleep(0.01)


class Host:
    """One host over a folder that outlives its process.

    Attributes:
        socket: of its door.
        patient: a kvtier.toml of clients that wait for it longer than usual, however busy this machine is.
    """

    def __init__(self, folder: Path, arena: Path, capacity: int = CAPACITY) -> None:
        self.socket = folder / "door.sock"
        self.patient = folder / "kvtier.toml"
        self.patient.write_text(f'run_dir = "{folder}"\n[client]\ncall_timeout = "10s"\n')
        self._places = [str(self.socket), str(arena), str(folder / "nvme"), str(capacity)]
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """Run it; with what is there of a former life."""
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "services")])}
        command = [sys.executable, "-m", "tests.engines_vllm.host_child", *self._places]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environ, cwd=ROOT, text=True)
        self._hear()

    def kill(self) -> None:
        """SIGKILL; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10.0)
            process.stdin.close()
            process.stdout.close()

    def tell(self, command: str) -> Any:
        """One of the commands of `host_child`."""
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> Any:
        line = self._process.stdout.readline()
        assert line, f"the host ended with {self._process.wait(5.0)}"
        return json.loads(line)

    @property
    def stored(self) -> int:
        """Blocks committed since it was started."""
        return self.tell("status")["stored"]

    @property
    def blocks(self) -> int:
        """Blocks that are there, wherever."""
        return self.tell("status")["blocks"]

    def has(self, blocks: int) -> None:
        """Wait until so many blocks are there, and nothing is being written any more: saves are in the background."""
        eventually(lambda: (s := self.tell("status"))["blocks"] + 1000 * s["reservations"], blocks)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs meanwhile."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def idle(self) -> None:
        """Wait until nobody holds a lease or a reservation."""
        eventually(lambda: [self.tell("status")[what] for what in ("leases", "reservations")], [0, 0])


@contextmanager
def running(capacity: int = CAPACITY) -> Iterator[Host]:
    """A host with folders of its own; pytest's are too long for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-vllm-"))
    arena = Path(tempfile.mkdtemp(prefix="kvt-arena-", dir=SHARED))
    host = None
    try:
        host = Host(folder, arena, capacity)
        yield host
    finally:
        if host is not None:
            host.kill()
        shutil.rmtree(folder)
        shutil.rmtree(arena)
