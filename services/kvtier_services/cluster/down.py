"""`kvtier down`: end exactly what `up` started."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.memory.lock import FileLock, is_free
from kvtier_services import redis_server
from kvtier_services.actors.folders import sweep_arena
from kvtier_services.cluster import node, process, state
from kvtier_services.cluster.state import Running
from kvtier_services.settings import Settings, host_name

FLUSH_SECONDS = 10.0
"""Seconds for writing down blocks that only the CPU tier has."""
END_SECONDS = 8.0
FAREWELL_MARGIN = 30.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """What `down` did.

    Attributes:
        ran: whether there was anything to end.
        stale: it had ended by itself; only its remains were cleaned up.
        written: blocks written down to NVMe, None when the hosts did not say.
        lost: blocks that only memory had.
        problems: what is left, and why.
        seconds: it took.
    """

    ran: bool
    stale: bool = False
    written: int | None = None
    lost: int | None = None
    problems: tuple[str, ...] = ()
    seconds: float = 0.0


def down(config: Config, *, flush_seconds: float = FLUSH_SECONDS, say: Say = lambda _: None) -> Ended:
    """End the kvtier of this configuration's run_dir.

    Raises:
        ConfigError: another `up` or `down` is at work, or the state file cannot be read.
    """
    settings = Settings(config)
    if state.read(settings.state_file) is None:
        return Ended(ran=False)
    with at_work(settings):
        running = state.read(settings.state_file)
        if running is None:
            return Ended(ran=False)
        return clean(running, settings.run_dir, flush_seconds=flush_seconds, say=say)


def clean(running: Running, run_dir: Path, *, flush_seconds: float, say: Say = lambda _: None) -> Ended:
    """End what a state file tells of, and remove its files; what `up` calls too, for what it could not finish.

    Args:
        running: what was started.
        run_dir: where the state file is.
        flush_seconds: for writing down blocks; 0 for not at all.
        say: told of each step.
    """
    began, problems = time.monotonic(), []
    alive = is_alive(running)
    written = lost = None
    if alive and running.namespace:  # else it came to no controller
        say("ending the actors")
        hosts, problem = _farewell(running, flush_seconds)
        told = [host for host in hosts if "written" in host]
        if told:
            written, lost = sum(host["written"] for host in told), sum(host["lost"] for host in told)
        if problem and not running.own_ray:
            problems.append(problem)
    if running.own_ray:
        say("ending Ray")
        left = process.end(lambda: processes(running), END_SECONDS)
        problems += [f"process {pid} does not end" for pid in left]
        node.sweep(running.ray_temp)
    if running.redis:
        redis_server.stop(run_dir)
    problems += _sweep(running, run_dir)
    seconds = time.monotonic() - began
    return Ended(ran=True, stale=not alive, written=written, lost=lost, problems=tuple(problems), seconds=seconds)


def is_alive(running: Running) -> bool:
    """Whether what was started is still there: the head that was started, or the user's cluster."""
    if running.own_ray:
        return running.head is not None and running.head.alive()
    if not running.address:
        return False
    host, _, port = running.address.rpartition(":")
    try:
        with socket.create_connection((host or "127.0.0.1", int(port)), timeout=3.0):
            return True
    except (OSError, ValueError):
        return False


@contextmanager
def at_work(settings: Settings) -> Iterator[None]:
    """Be the only `up` or `down` of this run folder.

    Raises:
        ConfigError: another one is.
    """
    lock = FileLock(settings.up_lock)
    try:
        if not lock.acquire(1.0):
            raise ConfigError(
                f"another `kvtier up` or `down` is at work in {settings.run_dir} ({lock.read()}); wait for it"
            )
        lock.note(f"pid {os.getpid()}")
        yield
    finally:
        lock.close()


def environment(running: Running) -> dict[str, str]:
    """What a driver of its Ray cluster must have in its environment."""
    if not running.own_ray:
        return dict(os.environ)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | node.auth_environment(Path(running.ray_token))


def processes(running: Running) -> set[psutil.Process]:
    """All processes of kvtier's own Ray node on this host."""
    return {*(running.head.tree() if running.head else ()), *process.marked(node.RUN_ENV, running.run)}


def _farewell(running: Running, flush_seconds: float) -> tuple[list[dict[str, int]], str]:
    """What the hosts said, and what went wrong."""
    command = [sys.executable, "-m", "kvtier_services.cluster.farewell"]
    command += [running.address, running.namespace, str(flush_seconds), running.host]
    command += [host_name()] if running.joined else []
    try:
        done = subprocess.run(  # noqa: S603
            command,
            env=environment(running) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=2 * flush_seconds + FAREWELL_MARGIN,
            check=True,
        )
        answer = msgspec.json.decode(done.stdout)
    except (subprocess.SubprocessError, msgspec.MsgspecError) as exc:
        said = (getattr(exc, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        return [], f"the actors in the Ray cluster {running.address} could not be ended: {said[-1] if said else exc}"
    return answer["hosts"], ""


def _sweep(running: Running, run_dir: Path) -> list[str]:
    """Remove the files; what could not be removed."""
    problems = []
    arena = Path(running.arena_dir)
    if arena.is_dir():
        if _wait_free(arena / "lock"):
            sweep_arena(arena)
        else:
            problems.append(f"the arena in {arena} is still in use by a process that this kvtier did not start")
    Path(running.socket).unlink(missing_ok=True)
    if running.joined and (run_dir / "door.sock").is_symlink():
        (run_dir / "door.sock").unlink(missing_ok=True)
    if running.ray_token:
        Path(running.ray_token).unlink(missing_ok=True)
    for name in ("ray.log", "fleet.secret", "redis.password"):
        (run_dir / name).unlink(missing_ok=True)
    shutil.rmtree(run_dir / "ray.gcs", ignore_errors=True)
    (run_dir / "state.json").unlink(missing_ok=True)
    return problems


def _wait_free(lock: Path, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_free(lock):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
