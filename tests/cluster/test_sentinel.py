"""Hosts whose index is behind a Sentinel: its master is killed, another takes over, and hits come back."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier_services.redis_server import find_binary
from tests.cluster.fleet import Fleet, fleet
from tests.cluster.kit import within
from tests.cluster.network import PREFIX, Network, why_not
from tests.cluster.trial import PATIENCE, Trial

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=f"no hosts of their own: {why_not()}")]

ADDRESS = f"{PREFIX}.254"
MASTER, REPLICA, SENTINEL = 7101, 7102, 7103
INDEX = f"""
[index]
url = "redis+sentinel://{ADDRESS}:{SENTINEL}/main"
"""
WATCH = f"""
port {SENTINEL}
bind {ADDRESS}
protected-mode no
sentinel monitor main {ADDRESS} {MASTER} 1
sentinel down-after-milliseconds main 1000
sentinel failover-timeout main 5000
"""


class Servers:
    """On the switch, where all hosts reach them and none can be cut off from them alone."""

    def __init__(self, net: Network, folder: Path) -> None:
        self._net = net
        self._folder = folder
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        command = self._net.inside("setpriv", "--pdeathsig", "KILL", str(find_binary()), *args)
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.running.append(subprocess.Popen(command, cwd=self._folder, **quiet))
        return self.running[-1]

    def store(self, port: int, *more: str) -> subprocess.Popen[bytes]:
        plain = ("--bind", ADDRESS, "--port", str(port), "--protected-mode", "no", "--save", "")
        return self.start(*plain, "--repl-diskless-sync-delay", "0", *more)

    def ask(self, port: int, *words: str) -> str:
        script = (
            "import sys, redis; c = redis.Redis(sys.argv[1], int(sys.argv[2]), socket_timeout=1);"
            "print(c.execute_command(*sys.argv[3:]))"
        )
        command = self._net.inside(sys.executable, "-c", script, ADDRESS, str(port), *words)
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def end(self) -> None:
        for server in self.running:
            server.kill()
            server.wait(10.0)


@contextmanager
def watched(net: Network, folder: Path) -> Iterator[tuple[Servers, subprocess.Popen[bytes]]]:
    """A master, a replica that is in step, and a Sentinel that knows of both."""
    servers = Servers(net, folder)
    try:
        master = servers.store(MASTER)
        servers.store(REPLICA, "--replicaof", ADDRESS, str(MASTER))
        (folder / "sentinel.conf").write_text(WATCH)
        within(20.0, lambda: "master_link_status': 'up" in servers.ask(REPLICA, "INFO", "replication"))
        servers.start(str(folder / "sentinel.conf"), "--sentinel")
        within(20.0, lambda: f"{REPLICA}" in servers.ask(SENTINEL, "SENTINEL", "REPLICAS", "main"))
        yield servers, master
    finally:
        servers.end()


@pytest.fixture
def running() -> Iterator[Fleet]:
    with fleet(INDEX, names=("alpha", "beta")) as made:
        yield made


def test_the_indexs_master_dies_and_another_takes_over(
    running: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n    {line}", end="", flush=True)  # noqa: T201

    assert running.network is not None
    (tmp_path / "redis").mkdir()
    with watched(running.network, tmp_path / "redis") as (servers, master):
        running.up()
        trial = Trial(running, tmp_path, say)
        near, far = trial.save("beta"), trial.save("alpha")
        trial.back("before", "alpha", near, time.monotonic())
        with trial.load("fail-over"):
            master.kill()
            began = time.monotonic()
            trial.serves_itself("beta", near)
            later = trial.save("alpha")
            within(
                PATIENCE, lambda: str(REPLICA) in servers.ask(SENTINEL, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
            )
            trial.say(f"fail-over: the Sentinel took {time.monotonic() - began:.1f} s")
            trial.back("fail-over", "beta", far, began)
            trial.back("fail-over", "beta", later, began)
