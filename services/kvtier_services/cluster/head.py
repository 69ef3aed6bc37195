"""A Ray head of kvtier's own, as a subprocess."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier_services.cluster.process import Process

RUN_ENV = "KVTIER_RUN"
"""Environment variable of all processes of one run."""
PORTS = range(20000, 32000)
"""Where free ports are looked for: above Ray's default worker ports, below what the kernel hands out."""
WORKER_PORTS = 64
OBJECT_STORE = 80 << 20
"""The least that Ray takes; no block goes through it."""
NAMED_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "ray-client-server-port",
)


@dataclass(frozen=True, slots=True)
class Head:
    """A started head.

    Attributes:
        process: `ray start --block`; all others are its children.
        address: for drivers on this machine.
        temp: its temporary folder.
    """

    process: Process
    address: str
    temp: str


def auth_environment(token: Path) -> dict[str, str]:
    """What every process of kvtier's own cluster must have."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


def make_token(path: Path) -> None:
    """Write a new token, mode 0600."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(32))


def start(
    run: str,
    token: Path,
    log: Path,
    *,
    port: int = 0,
    started: Callable[[Process, str], object] = lambda _process, _temp: None,
    deadline: float = 60.0,
) -> Head:
    """Start a head and wait until its GCS accepts connections.

    Args:
        run: name of this run.
        token: file of the token.
        log: file for what it prints.
        port: of the GCS; 0 for a free one.
        started: told the process and the temporary folder as soon as they exist.
        deadline: seconds that it may take.

    Raises:
        ConfigError: the port is taken, or it does not come up.
    """
    if port and not _is_free(port):
        raise ConfigError(f"ray.port {port} is in use on this machine; set it to another one, or to 0 for any free one")
    gcs, *named, first_worker = _free_ports(port)
    temp = tempfile.mkdtemp(prefix="kvtier-ray-")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={gcs}"]
    command += [f"--{name}={number}" for name, number in zip(NAMED_PORTS, named, strict=True)]
    command += [f"--min-worker-port={first_worker}", f"--max-worker-port={first_worker + WORKER_PORTS - 1}"]
    command += ["--include-dashboard=false", "--disable-usage-stats", "--num-cpus=0"]
    command += [f"--object-store-memory={OBJECT_STORE}", f"--temp-dir={temp}"]
    with log.open("wb") as output:
        log.chmod(0o600)
        child = subprocess.Popen(  # noqa: S603
            command,
            env=environment(os.environ, run, token),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    process = Process.of(child.pid)
    if process is None:
        raise ConfigError(f"the Ray head ended at once: {_last_lines(log)}")
    started(process, temp)
    address = _wait(child, Path(temp), gcs, log, time.monotonic() + deadline)
    child.returncode = 0  # it lives on without us
    return Head(process, address, temp)


def environment(outer: Mapping[str, str], run: str, token: Path) -> dict[str, str]:
    """Environment of the head: nothing of what the user's shell says to another Ray."""
    kept = {name: value for name, value in outer.items() if not name.startswith("RAY_")}
    return kept | {
        **auth_environment(token),
        RUN_ENV: run,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path and not path.endswith(".zip")),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # actors that claim no GPU see them all the same
        "RAY_memory_monitor_refresh_ms": "0",  # the arena is not a leak to be ended
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def sweep(temp: str) -> None:
    """Remove the temporary folder of a head that is gone."""
    if Path(temp).name.startswith("kvtier-ray-"):
        shutil.rmtree(temp, ignore_errors=True)


def _wait(child: subprocess.Popen[bytes], temp: Path, port: int, log: Path, deadline: float) -> str:
    """Address of the GCS, once it accepts connections there."""
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise ConfigError(f"the Ray head does not start: {_last_lines(log)}")
        try:
            address = (temp / "ray_current_cluster").read_text().strip()
            host, _, at = address.rpartition(":")
            with socket.create_connection((host, int(at)), timeout=1.0):
                return address
        except (OSError, ValueError):
            time.sleep(0.05)
    raise ConfigError(f"the Ray head on port {port} does not come up; its log {log} ends: {_last_lines(log)}")


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-4:]) or "it printed nothing"


def _free_ports(gcs: int) -> list[int]:
    """Ports for the GCS, each named port, and the first of a free range for workers."""
    need = len(NAMED_PORTS) + WORKER_PORTS + 1
    for _ in range(200):
        first = secrets.choice(PORTS[:-need])
        wanted = range(first, first + need)
        if gcs not in wanted and all(map(_is_free, wanted)):
            return [gcs or first, *wanted[1 : len(NAMED_PORTS) + 2]]
    raise ConfigError(f"no {need} free ports in a row between {PORTS.start} and {PORTS.stop} for Ray on this machine")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
