"""A Ray cluster that kvtier did not start."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier_services.cluster import process
from kvtier_services.cluster.process import Process
from tests.cluster.kit import environment, within

TOKEN = "0123456789abcdef" * 4


@dataclass(frozen=True)
class ForeignRay:
    """A Ray head that kvtier did not start."""

    head: Process
    address: str
    token: str

    @property
    def env(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.token}


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@contextmanager
def foreign_ray(port: int = 0) -> Iterator[ForeignRay]:
    """A head with a token; nothing of it is left afterwards.

    Args:
        port: of its GCS; 0 for a free one.
    """
    temp = tempfile.mkdtemp(prefix="ray-")
    token = Path(temp, "token")
    token.write_text(TOKEN)
    names = ("port", "node-manager-port", "object-manager-port", "dashboard-agent-grpc-port", "ray-client-server-port")
    names += ("dashboard-agent-listen-port", "runtime-env-agent-port", "metrics-export-port")
    ports = [port, *free_ports(len(names))] if port else free_ports(len(names))
    flags = [f"--{name}={number}" for name, number in zip(names, ports, strict=False)]
    flags += ["--min-worker-port=0", "--max-worker-port=0", "--num-cpus=0", "--object-store-memory=80000000"]
    flags += ["--include-dashboard=false", f"--temp-dir={temp}"]
    child = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *flags],
        env=environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token), RAY_USAGE_STATS_ENABLED="0"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    head = Process.of(child.pid)
    assert head is not None
    try:
        address = within(
            60.0, lambda: current.read_text() if (current := Path(temp, "ray_current_cluster")).exists() else ""
        )
        yield ForeignRay(head, str(address).strip(), str(token))
    finally:
        tree = head.tree()
        assert not process.end(lambda: tree, 10.0)
        child.wait(5.0)
        shutil.rmtree(temp, ignore_errors=True)
