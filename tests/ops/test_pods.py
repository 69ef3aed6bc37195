"""The pods of the manifests, run: Redis, the head with its sidecar, hosts, an engine in a pod of its own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier_services.redis_server import find_binary
from tests.cluster.kit import within
from tests.cluster.network import network, why_not
from tests.ops.manifests import EXAMPLE, K8S, ROOT, Doc, combined, one, pods, rendered
from tests.ops.rules import broken
from tests.ops.sandbox import HEAD, Running, Sandbox, made_by_the_script, ray_command, ray_environment, remove
from tests.ops.schemas import nbytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"no pods of their own: {why_not()}"),
]
SMALLER = {'capacity = "2GiB"': 'capacity = "64MiB"', 'capacity = "16GiB"': 'capacity = "128MiB"'}


def smaller(docs: Sequence[Doc]) -> Sequence[Doc]:
    """Of the sizes, what this machine has."""
    data = one(docs, "ConfigMap", "kvtier-config")["data"]
    for large, small in SMALLER.items():
        assert large in data["kvtier.toml"]
        data["kvtier.toml"] = data["kvtier.toml"].replace(large, small)
    return docs


DOOR = "/run/kvtier/run/door.sock"
ENGINE = """
import sys
from pathlib import Path
from kvtier.client.door import DoorSession
from kvtier.testing.session import save
from tests.cluster.kit import blocks_read
what, door, first = sys.argv[1:]
session = DoorSession(Path(door))
print(save(session, int(first), 8) if what == "save" else blocks_read(session, int(first), 8, wait=10.0))
session.close()
"""
CLIENT = """
import sys
import numpy as np, torch, kvtier
url, token, ca = sys.argv[1:]
tokens, spec = np.arange(80, dtype=np.uint32), kvtier.KVSpec(2, 2, 16, "bfloat16", block_tokens=16)
kv = torch.randn(2, 2, 80, 2, 16).bfloat16()
with kvtier.connect(url, token=token, ca=ca) as cache:
    space = cache.keyspace(spec, model="m", revision="1")
    print(space.save(tokens, kv).result(30.0).blocks)
    out = torch.zeros_like(kv)
    with space.match(tokens) as hit:
        print(hit.load(out))
    assert torch.equal(out, kv)
"""


class Deployed:
    """All pods of an overlay."""

    def __init__(self, sandbox: Sandbox, docs: Sequence[Doc], token: str) -> None:
        self.sandbox, self.token = sandbox, token
        self.pods = {pod.name: pod for pod in pods(docs)}
        self.redis = sandbox.pod(self.pods["kvtier-redis"], 10, "kvtier-redis", "kvtier-redis.kvtier.svc.cluster.local")
        self.head = sandbox.pod(self.pods["kvtier-headgroup"], 1, HEAD, "kvtier-head-svc")
        (redis,) = self.redis.pod.spec["containers"]
        self.redis.start(redis, [str(find_binary()), *redis["command"][1:]])
        self.head.init()
        self.sidecar = self.head.pod.spec["containers"][1]
        self.head.start(self.sidecar)  # it may come before the head does
        self.ray(self.head)

    def ray(self, running: Running) -> None:
        container = running.pod.spec["containers"][0]
        memory = nbytes(container["resources"]["limits"]["memory"])
        running.start(container, ray_command(running.pod, memory), **ray_environment(self.token))

    def worker(self, name: str, number: int) -> Running:
        running = self.sandbox.pod(self.pods[name], number)
        running.init()
        self.ray(running)
        return running

    def status(self) -> dict:
        done = self.head.run("kvtier", "kvtier", "status", "--json")
        return json.loads(done.stdout) if done.returncode == 0 else {"hosts": [], "fault": done.stderr}

    def both(self) -> dict[str, dict] | None:
        """The two hosts, once both serve."""
        hosts = self.serving()
        return hosts if {"pod2", "pod3"} <= hosts.keys() else None

    def serving(self) -> dict[str, dict]:
        return {host["host"]: host for host in self.status()["hosts"] if host.get("serving")}


@contextmanager
def deployed(docs: Sequence[Doc]) -> Iterator[Deployed]:
    token = secrets.token_hex(32)  # KubeRay's
    folder = Path(tempfile.mkdtemp(prefix="kvp"))
    folder.chmod(0o755)
    known = {"kvtier": {"auth_token": token}, **made_by_the_script()[0]}
    with network() as net:
        sandbox = Sandbox(net, folder, known, docs)
        try:
            yield Deployed(sandbox, docs, token)
        except BaseException:
            for log in sorted(folder.glob("pod-*/*.log")):
                sys.stdout.write(f"--- {log.relative_to(folder)}\n{log.read_text()[-3000:]}\n")
            raise
        finally:
            sandbox.end()
            remove(folder)


def engine(pod: Running, name: str, what: str, first: int, **env: str) -> int:
    """Blocks of a chain that an engine in this container saved, or loaded whole and right."""
    done = pod.run(name, sys.executable, "-c", ENGINE, what, DOOR, str(first), PYTHONPATH=str(ROOT), **env)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1])


def asked(made: Deployed, url: str, **headers: str) -> tuple[int, str]:
    """Status and body, from elsewhere in the pods' network."""
    script = (
        "import sys, json, urllib.request as u, urllib.error as e\n"
        "try: a = u.urlopen(u.Request(sys.argv[1], headers=json.loads(sys.argv[2])), timeout=5)\n"
        "except e.HTTPError as x: a = x\n"
        "print(a.status, a.read().decode())"
    )
    command = made.sandbox.net.inside(sys.executable, "-c", script, url, json.dumps(headers))
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    code, _, body = done.stdout.partition(" ")
    return int(code), body


def test_dev_serves_outlives_its_parts_and_hands_over_what_ends():
    docs = smaller(rendered("dev"))
    with deployed(docs) as made:
        cpu, nvme = made.worker("kvtier-cpu", 2), made.worker("kvtier-nvme", 3)
        hosts = within(120.0, made.both, every=1.0)
        tiers = {name: [tier["tier"] for tier in host["hierarchy"]["tiers"]] for name, host in hosts.items()}
        assert tiers == {"pod2": ["cpu"], "pod3": ["cpu", "nvme"]}
        assert all(host["hierarchy"]["index"]["ok"] for host in hosts.values()), "Redis lets them do what they need"

        # What the kubelet and a browser ask.
        assert asked(made, f"http://{cpu.address}:9400/ready")[0] == 200

        page = f"http://{made.head.address}:9401/snapshot.json"
        assert asked(made, page)[0] == 401
        code, body = asked(made, page, Authorization=f"Bearer {made.sandbox.secrets['kvtier-status']['token']}")
        assert (code, json.loads(body)["health"]) == (200, "ok")

        # A save through the door of one, a load through the door of the other.
        assert engine(cpu, "ray-worker", "save", 0) == 8
        assert engine(nvme, "ray-worker", "load", 0) == 8

        # The container that stays is restarted, and Ray's head is killed: nothing of the tiers is.
        lives = {name: host["pid"] for name, host in hosts.items()}
        assert made.head.terminate("kvtier").wait(20.0) == 0
        os.kill(made.head.pid("ray-head"), 9)
        made.head.wait("ray-head")
        made.ray(made.head)
        made.head.start(made.sidecar)
        again = within(120.0, made.both, every=1.0)
        assert {name: host["pid"] for name, host in again.items()} == lives
        assert engine(cpu, "ray-worker", "load", 0) == 8

        # A pod ends: what only it had is on the other one.
        assert engine(cpu, "ray-worker", "save", 100) == 8
        began = time.monotonic()
        cpu.terminate("ray-worker")
        cpu.wait("ray-worker")
        assert time.monotonic() - began < cpu.pod.spec["terminationGracePeriodSeconds"]
        assert within(30.0, lambda: engine(nvme, "ray-worker", "load", 100) == 8)


@pytest.fixture
def closed(tmp_path: Path) -> Sequence[Doc]:
    """What prod has besides its sizes and GPUs: TLS, the gateway, the folder that engines share."""
    text = (K8S / "overlays/prod/kvtier.toml").read_text()
    for large, small in (('"64GiB"', '"2GiB"'), ('"800GiB"', '"16GiB"')):
        text = text.replace(large, small)
    docs = combined(tmp_path, "shared-memory", "tls", config=text)
    assert broken(docs) == []
    return smaller(docs)


def test_with_tls_engines_come_in_by_the_nodes_memory_and_by_the_gateway(closed, tmp_path):
    known, token = made_by_the_script()
    with deployed(closed) as made:
        host, other = made.worker("kvtier-nvme", 3), made.worker("kvtier-cpu", 2)
        within(120.0, made.both, every=1.0)
        assert engine(other, "ray-worker", "save", 0) == 8
        assert engine(host, "ray-worker", "load", 0) == 8, "over TLS, from the other host"

        # An engine in a pod of its own, as another user, on the same node.
        (example,) = pods(rendered(EXAMPLE))
        beside = made.sandbox.pod(example, 4, node=host.node)
        beside.start(example.spec["containers"][0], ["sleep", "600"])
        assert engine(beside, "vllm", "load", 0) == 8
        assert engine(beside, "vllm", "save", 200) == 8
        assert engine(host, "ray-worker", "load", 200) == 8
        secret = beside.run("vllm", "cat", "/run/kvtier/run/fleet.secret")
        assert "Permission denied" in secret.stderr

        # A client without the node's memory, by the gateway, with a token.
        ca = tmp_path / "ca.crt"
        ca.write_text(known["kvtier-ca"]["ca.crt"])
        command = [sys.executable, "-c", CLIENT, f"grpcs://{host.address}:7070", token, str(ca)]
        done = subprocess.run(
            made.sandbox.net.inside(*command), capture_output=True, text=True, timeout=200, check=False, cwd=ROOT
        )
        assert done.stdout.split() == ["5", "80"], done.stderr[-2000:]

        # Who has no certificate is not let in, whatever he knows.
        plain = host.run("ray-worker", "ray", "health-check", "--address", f"{made.head.address}:6379", RAY_USE_TLS="0")
        assert plain.returncode != 0
