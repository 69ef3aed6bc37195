"""Pods without Kubernetes: what manifests say is done on this machine by the kernel's own means.

Containers have process, mount, network and host-name namespaces, the manifest's user, groups and capabilities, a
read-only root of this machine's own files, the volumes, and the environment. What is not there: images, limits of
control groups, network policies, probes. KubeRay's part is `ray_command` and `ray_environment`.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.cluster.kit import environment, within
from tests.cluster.network import PREFIX, Machine, Network
from tests.ops.manifests import K8S, ROOT, Doc, Pod, documents
from tests.ops.rules import SECRETS
from tests.ops.schemas import faults

HEAD = "kvtier-head-svc.kvtier.svc.cluster.local"
PATHS = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
}
IN_ROOT = ("sh", "-c", 'cd / && exec "$@"', "sh")
KEEP = sorted({str(ROOT), sys.base_prefix, sys.prefix})


class Sandbox:
    """A node of Kubernetes for each pod, and what all of them know.

    Attributes:
        folder: of all files.
        secrets: what is in which Secret.
        keep: folders of this machine that the image has.
        maps: the same of ConfigMaps.
        hosts: addresses of Services, as lines of /etc/hosts.
    """

    def __init__(
        self,
        net: Network,
        folder: Path,
        secrets: Mapping[str, Mapping[str, str]],
        docs: Sequence[Doc],
        keep: Sequence[str] = (),
    ) -> None:
        self.keep = sorted({*KEEP, *keep})
        self.net, self.folder, self.secrets = net, folder, secrets
        self.maps = {doc["metadata"]["name"]: doc["data"] for doc in docs if doc["kind"] == "ConfigMap"}
        self.hosts: list[str] = []
        self.pods: list[Running] = []

    def pod(self, pod: Pod, number: int, *names: str, node: Path | None = None) -> Running:
        """Prepare a pod; its containers are started one by one.

        Args:
            pod: from the manifests.
            number: of its address, and of nobody else's.
            names: by which all others find it; the first begins with its own.
            node: folder of its node's files, if it shares the node with another pod.
        """
        address = f"{PREFIX}.{number}"
        self.hosts += [f"{address} {name}" for name in names]
        name = names[0].partition(".")[0] if names else "pod"
        running = Running(self, pod, name, address, self.net.machine(f"pod{number}", number), node)
        self.pods.append(running)
        return running

    def end(self) -> None:
        for pod in self.pods:
            pod.end()


class Running:
    """A pod that runs."""

    def __init__(
        self, sandbox: Sandbox, pod: Pod, name: str, address: str, machine: Machine, node: Path | None
    ) -> None:
        self.pod, self.name, self.address = pod, name, address
        self._sandbox, self._machine = sandbox, machine
        self.folder = sandbox.folder / f"pod-{address.rpartition('.')[2]}"
        self.node = node or self.folder / "node"
        self._shares = bool(pod.spec.get("shareProcessNamespace"))
        self._containers: dict[str, subprocess.Popen[bytes]] = {}
        for name, volume in pod.volumes.items():
            self._volume(name, volume)

    def start(self, container: Doc, command: Sequence[str] = (), **env: str) -> subprocess.Popen[bytes]:
        """Start a container.

        Args:
            container: of the pod.
            command: in place of its own.
            env: more of it.
        """
        name = container["name"]
        root = self.folder / "roots" / name
        root.mkdir(parents=True, exist_ok=True)
        mounts = [
            [str(self.volume(one["name"])), one["mountPath"], not one.get("readOnly")]
            for one in container.get("volumeMounts", ())
        ]
        context, own = self.pod.spec.get("securityContext", {}), container.get("securityContext", {})
        user = own.get("runAsUser", context.get("runAsUser", 0))
        groups = [own.get("runAsGroup", context.get("runAsGroup", 0)), *context.get("supplementalGroups", ())]
        groups += [context["fsGroup"]] if "fsGroup" in context else []
        known = PATHS | self._environment(container) | env
        argv = list(command) or [*container["command"], *container.get("args", ())]
        for variable, value in known.items():
            argv = [word.replace(f"$({variable})", value) for word in argv]
        spec = {
            "root": str(root),
            "keep": self._sandbox.keep,
            "hosts": [f"{self.address} pod{self.address.rpartition('.')[2]}", *self._sandbox.hosts],
            "mounts": sorted(mounts, key=lambda mount: len(mount[1])),
            "user": user,
            "groups": groups,
            "capabilities": own.get("capabilities", {}).get("add", []),
            "env": known,
            "command": argv,
        }
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(spec))
        # A pod is below the machine's first process, with which the kernel takes all of it away. A signal at the death
        # of the parent would not do: it is forgotten when a process changes its user, as containers do.
        enter = ["nsenter", "-t", str(self._machine.pid), "-n", "-u", "-p"]
        apart = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", "--mount", "--ipc"]
        apart += [] if self._shares else ["--pid"]
        with self.log(name).open("ab") as out:
            self._containers[name] = subprocess.Popen(
                [*enter, "--", *apart, sys.executable, "-m", "tests.ops.container", str(file)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        return self._containers[name]

    def begun(self, name: str) -> None:
        """Wait until a container runs its command, and no more what prepares it."""
        within(10.0, lambda: b"tests.ops.container" not in Path(f"/proc/{self.pid(name)}/cmdline").read_bytes())

    def init(self) -> None:
        """Run the init containers, one after the other, as they are."""
        for container in self.pod.spec.get("initContainers", ()):
            assert self.start(container).wait(60.0) == 0, self.log(container["name"]).read_text()

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def pid(self, name: str) -> int:
        """Of the container's first process, as this machine counts."""
        found = self._containers[name].pid
        for _ in ("nsenter", "unshare"):  # each forks for a process namespace
            children = Path(f"/proc/{found}/task/{found}/children")
            (child,) = within(10.0, children.read_text).split()
            found = int(child)
        return found

    def terminate(self, name: str) -> subprocess.Popen[bytes]:
        """What the kubelet sends when a pod, or a container, is to end."""
        self.begun(name)
        os.kill(self.pid(name), 15)
        return self._containers[name]

    def wait(self, name: str) -> int:
        """Until it has ended, as long as its pod gives it."""
        return self._containers[name].wait(self.pod.spec["terminationGracePeriodSeconds"])

    def run(self, name: str, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec` does."""
        self.begun(name)
        (container,) = (one for one in self.pod.spec["containers"] if one["name"] == name)
        context = self.pod.spec["securityContext"]
        user = ["setpriv", "--reuid", str(context["runAsUser"]), "--regid", str(context["runAsGroup"])]
        groups = [context["runAsGroup"], *context.get("supplementalGroups", ())]
        inside = ["nsenter", "-t", str(self.pid(name)), "-m", "-p", "-n", "-u", "-i", "-r", "--"]
        return subprocess.run(
            [*inside, *user, "--groups", ",".join(map(str, groups)), "--", *IN_ROOT, *command],
            env=PATHS | self._environment(container) | env, capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip

    def end(self) -> None:
        self._machine.end()
        for container in self._containers.values():
            container.wait(10.0)
        for name, volume in self.pod.volumes.items():
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                shutil.rmtree(self.volume(name), ignore_errors=True)

    def _environment(self, container: Doc) -> dict[str, str]:
        fields = {"status.podIP": self.address, "metadata.namespace": "kvtier", "metadata.name": self.name}
        said = {}
        for one in container.get("env", ()):
            source = one.get("valueFrom", {})
            if "fieldRef" in source:
                said[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "configMapKeyRef" in source:
                said[one["name"]] = self._sandbox.maps[source["configMapKeyRef"]["name"]][
                    source["configMapKeyRef"]["key"]
                ]
            elif "secretKeyRef" in source:
                said[one["name"]] = self._sandbox.secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            else:
                said[one["name"]] = one["value"]
        return said

    def volume(self, name: str) -> Path:
        """Folder of this machine that a volume is."""
        volume = self.pod.volumes[name]
        if "hostPath" in volume:
            return self.node / volume["hostPath"]["path"].strip("/")
        if volume.get("emptyDir", {}).get("medium") == "Memory" and os.access("/dev/shm", os.W_OK):
            return Path("/dev/shm", f"{self._sandbox.folder.name}-{self.folder.name}-{name}")
        return self.folder / "volumes" / name

    def _volume(self, name: str, volume: Doc) -> None:
        """Make it, with the owners and modes that the kubelet gives it."""
        at, group = self.volume(name), self.pod.spec["securityContext"].get("fsGroup", 0)
        at.mkdir(parents=True, exist_ok=True)
        if "hostPath" in volume:
            return
        os.chown(at, 0, group)
        at.chmod(0o2777)
        source = volume.get("secret") or volume.get("configMap")
        if source:
            known = self._sandbox.secrets if "secret" in volume else self._sandbox.maps
            data = known[source.get("secretName") or source["name"]]
            items = source.get("items") or [{"key": key, "path": key} for key in data]
            for item in items:
                file = at / item["path"]
                file.write_text(data[item["key"]])
                os.chown(file, 0, group)
                file.chmod(source.get("defaultMode", 0o644) | 0o440)
            at.chmod(0o755)


def ray_command(pod: Pod, memory: int) -> list[str]:
    """How KubeRay starts Ray in a pod of a group."""
    assert pod.ray is not None
    head = pod.labels["ray.io/node-type"] == "head"
    said = {"block": "true", "metrics-export-port": "8080", "memory": str(memory), **pod.ray["rayStartParams"]}
    said |= {} if head else {"address": f"{HEAD}:6379"}
    said |= (
        {"labels": ",".join(f"{name}={value}" for name, value in pod.ray["labels"].items())}
        if "labels" in pod.ray
        else {}
    )
    flags = [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in said.items()]
    return ["/bin/bash", "-c", "--", f"ulimit -n 65536; ray start {'--head ' * head}{' '.join(flags)}"]


def ray_environment(token: str) -> dict[str, str]:
    """What KubeRay adds to its containers' environment."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_ADDRESS": f"{HEAD}:6379", "RAY_PORT": "6379"}


@functools.cache
def made_by_the_script() -> tuple[dict[str, dict[str, str]], str]:
    """Secrets, and the token that is shown."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", K8S / "secrets.sh"], env=environment(PATH=path), capture_output=True, text=True, check=True, timeout=120
    )
    known = {}
    for doc in documents(done.stdout):
        assert faults(doc) == []
        known[doc["metadata"]["name"]] = {key: base64.b64decode(value).decode() for key, value in doc["data"].items()}
    assert {name: {*data} for name, data in known.items()} == {
        name: keys for name, keys in SECRETS.items() if name != "kvtier"
    }
    return known, done.stderr.split()[-1]


def remove(folder: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(folder)
