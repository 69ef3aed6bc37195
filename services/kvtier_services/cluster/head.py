"""A Ray head of kvtier's own, as a subprocess."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier_services.cluster import node
from kvtier_services.cluster.process import Process


@dataclass(frozen=True, slots=True)
class Head:
    """A started head.

    Attributes:
        process: `ray start --block`; all others are its children.
        address: for drivers, and for nodes that join.
        temp: its temporary folder.
    """

    process: Process
    address: str
    temp: str


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
    host: str = "",
    storage: str = "memory",
    started: Callable[[Process, str], object] = lambda _process, _temp: None,
    deadline: float = 60.0,
) -> Head:
    """Start a head and wait until its GCS accepts connections.

    Args:
        run: name of this run.
        token: file of the token.
        log: file for what it prints.
        port: of the GCS; 0 for a free one.
        host: its address for other nodes; empty for what Ray finds.
        storage: where it keeps what it knows: "memory", a folder, or redis://host:port.
        started: told the process and the temporary folder as soon as they exist.
        deadline: seconds that it may take.

    Raises:
        ConfigError: the port is taken, or it does not come up.
    """
    if port and not node.is_free(port):
        raise ConfigError(f"ray.port {port} is in use on this machine; set it to another one, or to 0 for any free one")
    gcs, *ports = node.free_ports(port)
    temp = tempfile.mkdtemp(prefix=node.TEMP_PREFIX)
    log.unlink(missing_ok=True)
    child = node.spawn(
        node.command(["--head", f"--port={gcs}", "--include-dashboard=false"], temp, host, ports),
        log,
        node.environment(os.environ, run, token, alone=not host) | _remembering(storage, run),
    )
    process = Process.of(child.pid)
    if process is None:
        raise ConfigError(f"the Ray head ended at once: {node.last_lines(log)}")
    started(process, temp)
    address = _wait(child, Path(temp), gcs, log, time.monotonic() + deadline)
    child.returncode = 0  # it lives on without us
    return Head(process, address, temp)


def _remembering(storage: str, run: str) -> dict[str, str]:
    """What makes it keep its tables, and find none of another run."""
    if storage == "memory":
        return {}
    if storage.startswith("redis://"):
        return {
            "RAY_REDIS_ADDRESS": storage.removeprefix("redis://"),
            "RAY_external_storage_namespace": f"kvtier-{run}",
        }
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": storage}


def _wait(child: subprocess.Popen[bytes], temp: Path, port: int, log: Path, deadline: float) -> str:
    """Address of the GCS, once it accepts connections there."""
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise ConfigError(f"the Ray head does not start: {node.last_lines(log)}")
        try:
            address = (temp / "ray_current_cluster").read_text().strip()
            host, _, at = address.rpartition(":")
            with socket.create_connection((host, int(at)), timeout=1.0):
                return address
        except (OSError, ValueError):
            time.sleep(0.05)
    raise ConfigError(f"the Ray head on port {port} does not come up; its log {log} ends: {node.last_lines(log)}")
