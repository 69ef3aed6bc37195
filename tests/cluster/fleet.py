"""A fleet of three hosts on one machine: apart in network, processes and name where the kernel allows it, else three
Ray nodes on loopback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvtier_services.cluster import node, process, state
from tests.cluster.kit import SHARED, environment
from tests.cluster.network import PREFIX, Machine, Network, network, why_not

NAMES = ("alpha", "beta", "gamma")
PORT = 6391
CONFIG = """
run_dir = "{folder}/{{host}}/run"
arena_dir = "{arena}/{{host}}"
[cpu]
capacity = "512MiB"
[nvme]
capacity = "128MiB"
path = "{folder}/{{host}}/nvme"
[gpu]
device = "off"
[metrics]
port = 0
[status]
port = 0
[ray]
host = "{address}"
port = {port}
{more}
"""


class Place(Protocol):
    """Where a host's processes run."""

    def inside(self, *command: str) -> list[str]: ...

    def end(self) -> None: ...


class Loopback:
    """No place of its own: what a host's processes are is known by their marks only."""

    def __init__(self, run_dir: Path) -> None:
        self._state = run_dir / "state.json"

    def inside(self, *command: str) -> list[str]:
        return list(command)

    def end(self) -> None:
        with suppress(Exception):
            if (known := state.read(self._state)) is not None:
                process.end(lambda: process.marked(node.RUN_ENV, known.run), 10.0)


@dataclass
class Host:
    """One host of the fleet.

    Attributes:
        name: of the host.
        number: of its plug.
        address: in the fleet's network.
        folder: of its files.
        config: the fleet's kvtier.toml.
        place: where its processes run; another one after its death.
    """

    name: str
    number: int
    address: str
    folder: Path
    config: Path
    place: Place

    @property
    def socket(self) -> Path:
        return self.folder / "run" / "door.sock"

    def cli(self, command: str, *args: str, rc: int = 0) -> str:
        """Output of `kvtier COMMAND`, run on this host."""
        done = self._run(command, *args)
        said = done.stdout + done.stderr
        assert done.returncode == rc, said
        assert "Traceback" not in said, said
        return said

    def status(self) -> dict:
        done = self._run("status", "--json")
        assert done.returncode == 0, done
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise AssertionError(done) from None

    def _run(self, command: str, *args: str) -> subprocess.CompletedProcess[str]:
        made = self.place.inside(sys.executable, "-m", "kvtier_services.cli", command, *args)
        # Ray's temporary folders go where the fleet's files do, and with them.
        env = environment(KVTIER_HOST=self.name, KVTIER_CONFIG=str(self.config), TMPDIR=str(self.folder.parent))
        return subprocess.run(made, env=env, capture_output=True, text=True, timeout=150, check=False)

    def kill(self, pid: int, signal: str = "KILL") -> None:
        """Send a signal to a process by the number that it has on this host."""
        assert pid > 0, "no process, and `kill` would take 0 for the whole group"
        subprocess.run(self.place.inside("kill", f"-{signal}", str(pid)), check=True)

    def signal_all(self, pattern: str, signal: str = "KILL") -> None:
        """Send a signal to all processes of this host whose command has this in it; none of another host's."""
        known = state.read(self.folder / "run" / "state.json")
        script = (
            "import os, signal, sys; from kvtier_services.cluster import node, process\n"
            "for one in process.marked(node.RUN_ENV, sys.argv[1]):\n"
            "    if sys.argv[2] in ' '.join(one.cmdline()): os.kill(one.pid, getattr(signal, 'SIG' + sys.argv[3]))"
        )
        assert known is not None
        command = self.place.inside(sys.executable, "-c", script, known.run, pattern, signal)
        subprocess.run(command, check=True, env=environment())


class Fleet:
    """Hosts, of which the first runs the Ray head and, unless another one is given, Redis."""

    def __init__(self, folder: Path, arena: Path, net: Network | None, more: str, names: Sequence[str]) -> None:
        self.network = net
        self._folder = folder
        config = folder / "kvtier.toml"
        addresses = [f"{PREFIX}.{number}" if net else f"127.0.0.{number}" for number in (1, 2, 3)]
        address = addresses[0] if net else _own_address()
        config.write_text(CONFIG.format(folder=folder, arena=arena, address=address, port=PORT, more=more))
        self.head_address = f"{address}:{PORT}"
        self.hosts = []
        for number, name in enumerate(names, 1):
            (folder / name).mkdir()
            place = net.machine(name, number) if net else Loopback(folder / name / "run")
            host = Host(name, number, addresses[number - 1], folder / name, config, place)
            self.hosts.append(host)

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def up(self) -> None:
        """Start the first host, and let the others join it."""
        first, *others = self.hosts
        first.cli("up")
        for host in others:
            self.join(host)

    def join(self, host: Host) -> str:
        token = self.hosts[0].folder / "run" / "ray.token"
        return host.cli("join", self.head_address, "--token", str(token), "--host", host.address)

    def power_off(self, host: Host) -> None:
        """Everything that runs there is gone at once; where hosts are apart, without a word."""
        if self.network and isinstance(host.place, Machine):
            self.network.power_off(host.place, host.number)
        else:
            host.place.end()

    def power_on(self, host: Host) -> None:
        """As after a restart in place: files are there, and no process."""
        if self.network:
            host.place = self.network.machine(host.name, host.number)

    def end(self) -> None:
        for host in reversed(self.hosts):
            host.place.end()


@contextmanager
def fleet(more: str = "", *, apart: bool | None = None, names: Sequence[str] = NAMES) -> Iterator[Fleet]:
    """A fleet that is not up yet. Nothing of it is left afterwards, whatever happened to it.

    Args:
        more: lines for its kvtier.toml.
        apart: as hosts of their own, or on loopback; None: as the kernel allows.
        names: of the hosts.
    """
    apart = not why_not() if apart is None else apart
    folder = Path(tempfile.mkdtemp(prefix="kvf"))
    arena = Path(tempfile.mkdtemp(prefix="kvf-arena-", dir=SHARED))
    made: Fleet | None = None
    try:
        if apart:
            with network() as net:
                made = Fleet(folder, arena, net, more, names)
                yield made
        else:
            made = Fleet(folder, arena, None, more, names)
            yield made
    finally:
        if made is not None:
            made.end()
        if not apart:
            for host in NAMES:  # a Redis on loopback is nobody's child
                from kvtier_services import redis_server

                redis_server.stop(folder / host / "run")
        shutil.rmtree(folder)
        shutil.rmtree(arena)


def _own_address() -> str:
    """This machine's address: a Ray head takes no loopback address."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"
