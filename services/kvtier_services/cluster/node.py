"""A Ray node of kvtier's own, as a subprocess: what the head and those that join it have in common."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier_services.settings import host_name

RUN_ENV = "KVTIER_RUN"
"""Environment variable of all processes of one run."""
TEMP_PREFIX = "kvtier-ray-"
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
RESOURCES = {"kvtier.cpu": 1, "kvtier.gpu": 1, "kvtier.nvme": 1}
"""What the tiers' processes hold, so that no autoscaler takes a cache for an idle node."""
LABEL = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?")
FLEET = {
    # A host that is cut off is dead for Ray after three times period and time-out, 9 s, and not after 65 s as by
    # default; for the index it is after 10 s without a heartbeat. Shorter cuts end nothing.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    # How long hosts wait for their head to come back; by default a minute, and then each ends what it runs.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
}


def auth_environment(token: Path) -> dict[str, str]:
    """What every process of kvtier's own cluster must have."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


def environment(outer: Mapping[str, str], run: str, token: Path, *, alone: bool = False) -> dict[str, str]:
    """Environment of a node: nothing of what the user's shell says to another Ray.

    Args:
        outer: the present one.
        run: random name of the run.
        token: file of the cluster's token.
        alone: no other host can join; then a node that is starved for seconds must not be taken for one that is gone.
    """
    kept = {name: value for name, value in outer.items() if not name.startswith("RAY_")}
    return kept | {
        **auth_environment(token),
        **({} if alone else FLEET),
        RUN_ENV: run,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path and not path.endswith(".zip")),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # actors that claim no GPU see them all the same
        "RAY_memory_monitor_refresh_ms": "0",  # the arena is not a leak to be ended
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def command(role: Sequence[str], temp: str, host: str, ports: Sequence[int]) -> list[str]:
    """How a node is started.

    Args:
        role: what makes it a head, or a member of one.
        temp: its temporary folder.
        host: its address for other nodes; empty for what Ray finds.
        ports: as `free_ports` gave them.

    Raises:
        ConfigError: $KVTIER_HOST cannot be a label.
    """
    *named, first_worker = ports
    name = host_name()
    labelled = LABEL.fullmatch(name) is not None
    if not labelled and name != socket.gethostname():
        raise ConfigError(
            f"$KVTIER_HOST is {name!r}; set it to letters, digits, dots and dashes, at most 63: Ray's nodes are "
            "labelled with it"
        )
    made = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, "--block"]
    made += [f"--{flag}={number}" for flag, number in zip(NAMED_PORTS, named, strict=True)]
    made += [f"--min-worker-port={first_worker}", f"--max-worker-port={first_worker + WORKER_PORTS - 1}"]
    made += ["--disable-usage-stats", "--num-cpus=0", f"--object-store-memory={OBJECT_STORE}", f"--temp-dir={temp}"]
    made += [f"--resources={json.dumps(RESOURCES)}"]
    made += [f"--labels=kvtier.io/host={name}"] if labelled else []
    return made + ([f"--node-ip-address={host}"] if host else [])


def spawn(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start it in a session of its own; what it prints goes to the end of `log`."""
    with log.open("ab") as output:
        log.chmod(0o600)
        return subprocess.Popen(  # noqa: S603
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def sweep(temp: str) -> None:
    """Remove the temporary folder of a node that is gone."""
    if Path(temp).name.startswith(TEMP_PREFIX):
        shutil.rmtree(temp, ignore_errors=True)


def last_lines(log: Path) -> str:
    """Of what it printed, for messages."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-4:]) or "it printed nothing"


def free_ports(gcs: int = 0) -> list[int]:
    """Ports for the GCS, each named port, and the first of a free range for workers.

    Args:
        gcs: the GCS's, if it is chosen.
    """
    need = len(NAMED_PORTS) + WORKER_PORTS + 1
    for _ in range(200):
        first = secrets.choice(PORTS[:-need])
        wanted = range(first, first + need)
        if gcs not in wanted and all(map(is_free, wanted)):
            return [gcs or first, *wanted[1 : len(NAMED_PORTS) + 2]]
    raise ConfigError(f"no {need} free ports in a row between {PORTS.start} and {PORTS.stop} for Ray on this machine")


def is_free(port: int) -> bool:
    """Whether nobody listens on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
