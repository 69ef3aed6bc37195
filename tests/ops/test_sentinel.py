"""The component redis-sentinel, run: three Redis and three Sentinels, of which the master is killed."""

from __future__ import annotations

import os
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
from tests.ops.fitting import config_of
from tests.ops.manifests import ROOT, Doc, pods, with_sentinels
from tests.ops.sandbox import PATHS, Running, Sandbox, made_by_the_script, remove

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"no pods of their own: {why_not()}"),
]
SERVICE = "kvtier-sentinel"
HOSTS = """
import os, sys, time
from tests.fleet_host import FleetHost
url, file = sys.argv[1:]
os.environ["KVTIER_HOST"] = "a"
a = FleetHost(url, file, 200, 4096)
os.environ["KVTIER_HOST"] = "b"
b = FleetHost(url, file, 200, 4096)
assert a.save(range(100_000, 100_100)) == 100
print("begun", flush=True)
for number in range(10_000):
    a.save([number])
    print(number, b.load([number], 1.0), flush=True)
    time.sleep(0.2)
"""


class Servers:
    """The pods of the StatefulSet, and two hosts of kvtier in another one."""

    def __init__(self, sandbox: Sandbox, docs: Sequence[Doc]) -> None:
        known = {pod.name: pod for pod in pods(docs)}
        self.config = config_of(docs)
        self.password = sandbox.secrets["kvtier-redis"]["password"]
        self.path = {"PATH": f"{find_binary().parent}:{PATHS['PATH']}"}
        pod = known[SERVICE]
        self.pods = [sandbox.pod(pod, 10 + n, f"{SERVICE}-{n}.{SERVICE}") for n in range(3)]
        self.client = sandbox.pod(known["kvtier-cpu"], 2)

    def start(self, pod: Running, *names: str) -> None:
        for container in pod.pod.spec["containers"]:
            if container["name"] in names:
                pod.start(container, **self.path)

    def hosts(self) -> None:
        index = self.config.index
        command = [sys.executable, "-c", HOSTS, index.url, index.password_file]
        self.client.start(self.client.pod.spec["containers"][0], command, PYTHONPATH=str(ROOT))

    def lines(self) -> list[list[str]]:
        said = [line.split() for line in self.client.log("ray-worker").read_text().splitlines()]
        return [words for words in said if len(words) == 2]

    def tried(self) -> int:
        """The last number that was."""
        return int(self.lines()[-1][0])

    def found(self) -> list[int]:
        """Numbers of the blocks that one host saved and the other one loaded."""
        return [int(number) for number, loaded in self.lines() if loaded == "1"]

    def roles(self) -> dict[str, str]:
        """Of each Redis that answers: "master", or whom it follows and how well."""
        return {pod.name: said for pod in self.pods if (said := self.role(pod))}

    def role(self, pod: Running) -> str:
        auth = (pod.folder / "volumes/acl/internal").read_text()
        done = pod.run("redis", "redis-cli", "--user", "sentinel", "role", REDISCLI_AUTH=auth, **self.path)
        words = done.stdout.split()
        if words[:1] == ["master"]:
            return "master"
        return f"{words[1].partition('.')[0]} {words[3]}" if words[:1] == ["slave"] else ""

    def follow(self, master: str) -> bool:
        """Whether all others follow this one."""
        return self.roles() == {
            pod.name: "master" if pod.name == master else f"{master} connected" for pod in self.pods
        }

    def known(self) -> bool:
        """Whether each Sentinel knows the others and both replicas: whom it does not know follows no new master."""
        auth = self.password
        for pod in self.pods:
            command = ("redis-cli", "-p", "26379", "--user", "kvtier", "sentinel", "masters")
            words = pod.run("sentinel", *command, REDISCLI_AUTH=auth, **self.path).stdout.split()
            said = dict(zip(words[::2], words[1::2], strict=False))
            if (said.get("num-slaves"), said.get("num-other-sentinels")) != ("2", "2"):
                return False
        return True

    def another(self, was: Running) -> Running:
        """The next master, when all others follow it."""

        def settled() -> Running | None:
            return next((pod for pod in self.pods if pod is not was and self.follow(pod.name)), None)

        found = within(60.0, settled, every=1.0)
        assert isinstance(found, Running)
        return found

    def kill(self, pod: Running, *names: str) -> None:
        for name in names:
            os.kill(pod.pid(name), 9)
        for name in names:
            pod.wait(name)

    def hits(self) -> float:
        """Seconds until a block that is saved from now on is found by the other host."""
        began, before = time.monotonic(), self.tried()
        within(100.0, lambda: self.found()[-1] > before)
        return time.monotonic() - began


@contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    docs = with_sentinels(folder)
    root = Path(tempfile.mkdtemp(prefix="kvr"))
    root.chmod(0o755)
    with network() as net:
        sandbox = Sandbox(net, root, made_by_the_script()[0], docs)
        try:
            yield Servers(sandbox, docs)
        except BaseException:
            for log in sorted(root.glob("pod-*/*.log")):
                sys.stdout.write(f"--- {log.relative_to(root)}\n{log.read_text()[-3000:]}\n")
            raise
        finally:
            sandbox.end()
            remove(root)


def test_a_master_that_is_killed_is_replaced_and_comes_back_behind_the_next(tmp_path):
    with servers(tmp_path) as made:
        for pod in made.pods:
            made.start(pod, "redis", "sentinel")
        within(60.0, lambda: made.follow(f"{SERVICE}-0"), every=1.0)
        within(60.0, made.known, every=1.0)
        made.hosts()
        within(60.0, made.found)

        # The container of the master is killed, and started again at once, as the kubelet does.
        master = made.pods[0]
        made.kill(master, "redis")
        made.start(master, "redis")
        said = [f"a container {made.hits():.1f} s"]
        following = made.another(master)
        within(60.0, made.known, every=1.0)

        # The pod of the master ends, and a new one has nothing of it.
        made.kill(following, "redis", "sentinel")
        for name in ("made", "data"):
            for file in following.volume(name).iterdir():
                file.unlink()
        made.start(following, "redis", "sentinel")
        said.append(f"a pod {made.hits():.1f} s")
        made.another(following)
        within(60.0, made.known, every=1.0)

        # Everything there was is lost at once.
        for pod in made.pods:
            made.kill(pod, "redis")
        for pod in made.pods:
            made.start(pod, "redis")
        said.append(f"all at once {made.hits():.1f} s")
        within(60.0, lambda: any(made.follow(pod.name) for pod in made.pods), every=1.0)
        print("hits between hosts came back after the end of:", ", ".join(said))  # noqa: T201
