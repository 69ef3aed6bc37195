"""The pods of the manifests, run: Redis, the head with its sidecar, hosts, an engine in a pod of its own."""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier_services.redis_server import find_binary
from tests.cluster.kit import within
from tests.cluster.network import network, why_not
from tests.ops.manifests import Doc, one, pods, rendered
from tests.ops.sandbox import HEAD, Running, Sandbox, ray_command, ray_environment, remove
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

    def serving(self) -> dict[str, dict]:
        return {host["host"]: host for host in self.status()["hosts"] if host.get("serving")}


@contextmanager
def deployed(docs: Sequence[Doc], more: dict[str, dict[str, str]] | None = None) -> Iterator[Deployed]:
    token, password = secrets.token_hex(32), secrets.token_hex(16)
    folder = Path(tempfile.mkdtemp(prefix="kvp"))
    folder.chmod(0o755)
    known = {
        "kvtier": {"auth_token": token},
        "kvtier-redis": {"password": password, "users.acl": acl(password)},
        "kvtier-status": {"token": secrets.token_hex(16)},
        **(more or {}),
    }
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


def acl(password: str) -> str:
    """As docs/kubernetes.md has one make it."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    rights = "+@read +@write +@connection +eval +evalsha +script|load +time -@dangerous"
    return f"user default off\nuser kvtier on #{digest} ~* {rights}\n"


def test_dev():
    docs = smaller(rendered("dev"))
    with deployed(docs) as made:
        made.worker("kvtier-cpu", 2)
        made.worker("kvtier-nvme", 3)
        hosts = within(90.0, lambda: hosts if len(hosts := made.serving()) == 2 else None, every=1.0)
        tiers = {name: [tier["tier"] for tier in host["hierarchy"]["tiers"]] for name, host in hosts.items()}
        assert tiers == {"pod2": ["cpu", "peer"], "pod3": ["cpu", "nvme", "peer"]}
