"""`kvtier up --stay`: as a container of a pod, over the lives of itself, the controller and the Ray cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.client.door import DoorSession
from kvtier.testing.session import save
from tests.cluster.foreign import TOKEN, foreign_ray, free_ports
from tests.cluster.kit import Cluster, blocks_read, environment, within

KILL = """
import sys
from kvtier_services.cluster import actors, state
from pathlib import Path
known = state.read(Path(sys.argv[1]))
with actors.connected(known.address, known.namespace):
    sys.exit(not actors.kill(actors.CONTROLLER, known.namespace))
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


@contextmanager
def staying(cluster: Cluster, address: str, env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        child = subprocess.Popen(
            cluster.command("up", "--address", address, "--stay"), env=environment(**env), stdout=out, stderr=out
        )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def serving(cluster: Cluster, env: dict[str, str]) -> dict:
    """Status of the host once it serves."""

    def ask() -> dict | None:
        done = subprocess.run(
            cluster.command("status", "--json"), env=environment(**env), capture_output=True, check=False, timeout=60
        )
        if done.returncode:
            return None
        import json

        snapshot = json.loads(done.stdout)
        host = next((one for one in snapshot["hosts"] if one.get("serving")), None)
        return {"snapshot": snapshot, "host": host} if host and "controller" in snapshot else None

    return within(120.0, ask, every=0.5)  # type: ignore[return-value]


@pytest.mark.slow
def test_it_outlives_the_controller_itself_and_the_cluster(cluster, env, tmp_path):
    text = cluster.config.read_text()
    cluster.config.write_text(text + '[index]\nurl = "local"\n')
    (port,) = free_ports(1)
    log = tmp_path / "log"
    from tests.cluster.fleet import _own_address

    address = f"{_own_address()}:{port}"
    with staying(cluster, address, env, log) as first:
        within(60.0, lambda: "no Ray cluster answers" in log.read_text())
        with foreign_ray(port):
            was = serving(cluster, env)
            session = DoorSession(cluster.socket)
            assert save(session, 0, 3) == 3

            # The controller ends for good: a new one finds the same tiers.
            killed = subprocess.run(
                [sys.executable, "-c", KILL, str(cluster.run_dir / "state.json")], env=environment(**env), check=False
            )
            assert killed.returncode == 0
            within(60.0, lambda: log.read_text().count("starting the controller") == 2)
            now = serving(cluster, env)
            assert now["snapshot"]["controller"]["pid"] != was["snapshot"]["controller"]["pid"]
            assert now["host"]["pid"] == was["host"]["pid"]

            # It ends with 0; what it looked after does not.
            first.terminate()
            assert first.wait(15.0) == 0
            assert blocks_read(session, 0, 3) == 3
            session.close()
            with staying(cluster, address, env, log) as second:
                within(60.0, lambda: log.read_text().count("hosts with tiers") >= 3)
                again = serving(cluster, env)
                assert again["host"]["pid"] == was["host"]["pid"]
                assert again["snapshot"]["controller"]["pid"] == now["snapshot"]["controller"]["pid"]
                assert second.poll() is None

                # Another one beside it, as while a pod is replaced, finds the same and disturbs nobody.
                with staying(cluster, address, env, log) as twin:
                    within(60.0, lambda: log.read_text().count("hosts with tiers") >= 4)
                    both = serving(cluster, env)
                    assert both["snapshot"]["controller"]["pid"] == now["snapshot"]["controller"]["pid"]
                    assert both["host"]["pid"] == was["host"]["pid"]
                    assert (twin.poll(), second.poll()) == (None, None)
    with staying(cluster, address, env, log) as third:
        with foreign_ray(port):
            before = serving(cluster, env)["host"]["pid"]
        with foreign_ray(port):
            assert within(
                120.0, lambda: (host := serving(cluster, env)["host"])["pid"] != before and host["pid"], every=1.0
            )
            third.terminate()
            assert third.wait(15.0) == 0
            cluster.cli("down", "--flush", "0", **env)
