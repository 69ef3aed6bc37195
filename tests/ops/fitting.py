"""Rules on what goes together: kvtier.toml and mounts, sizes and limits, ends and their time, TLS on all sides."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from kvtier.config import Config
from kvtier.config.load import parse
from kvtier.errors import ConfigError
from tests.ops.manifests import Doc, Pod, one, pods
from tests.ops.schemas import nbytes

GIB = 1 << 30
HEADROOM = 2 * GIB
"""Of a host's memory, for its processes: 0.4 GiB when it is empty, and the tables of its blocks."""
Rule = Callable[[Sequence[Doc]], Iterator[str]]


def config_of(docs: Sequence[Doc]) -> Config:
    text = one(docs, "ConfigMap", "kvtier-config")["data"]["kvtier.toml"]
    return parse(tomllib.loads(text), text)


def config_is_at_home(docs: Sequence[Doc]) -> Iterator[str]:
    """What kvtier.toml names is mounted where it is read, and listens where services look."""
    try:
        config = config_of(docs)
    except ConfigError as exc:
        yield str(exc)
        return
    fleet, remote = config.fleet, config.remote
    secrets = [config.index.password_file, fleet.cert, fleet.key, fleet.ca, remote.cert, remote.key]
    secrets += [remote.tokens_file] if remote.listen else []
    for pod in pods(docs):
        if pod.caches:
            folders = [config.run_dir, config.arena_dir, *secrets]
            declared = json.loads(json.loads(pod.ray["rayStartParams"]["resources"]))  # type: ignore[index]
            folders += [str(config.nvme.path)] if "kvtier.nvme" in declared else []
            yield from _unmounted(pod, pod.spec["containers"][0], folders)
            wanted = {"kvtier-metrics": config.metrics.port, "peers": config.fleet.port}
            wanted |= {"gateway": remote.address[1], "gateway-bulk": remote.bulk} if remote.listen else {}
            yield from (
                f"{pod.name}: port {name} is not {port}" for name, port in wanted.items() if pod.ports.get(name) != port
            )
            labels = pod.ray.get("labels", {})  # type: ignore[union-attr]
            if not config.ray.selected.items() <= labels.items():
                yield f"{pod.name}: is not among the nodes {config.ray.labels}"
        elif pod.ray is not None:
            for container in pod.spec["containers"]:
                yield from _unmounted(
                    pod, container, [config.run_dir, config.index.password_file, config.status.token_file]
                )
            if pod.ports.get("kvtier-status") != config.status.port:
                yield f"{pod.name}: the status page is not at {config.status.port}"
            if config.ray.selected.items() <= pod.ray.get("labels", {}).items():
                yield f"{pod.name}: the head would get tiers"
    yield from _index_is_there(config.index.url, docs)


def _unmounted(pod: Pod, container: Doc, files: Sequence[str]) -> Iterator[str]:
    mounts = [PurePosixPath(mount["mountPath"]) for mount in container.get("volumeMounts", ())]
    for file in filter(None, files):
        if not any(PurePosixPath(file).is_relative_to(mount) for mount in mounts):
            yield f"{pod.name}: {container['name']} has no volume for {file}"


def _index_is_there(url: str, docs: Sequence[Doc]) -> Iterator[str]:
    services = {doc["metadata"]["name"]: doc["spec"] for doc in docs if doc["kind"] == "Service"}
    for place in re.sub(r"^[^:]*://([^@/]*@)?", "", url).partition("/")[0].split(","):
        host, _, port = place.partition(":")
        name, _, rest = host.partition(".")
        service, pod = (rest, name) if services.get(rest, {}).get("clusterIP") == "None" else (name, "")
        there = {one["port"] for one in services.get(service, {}).get("ports", ())}
        if pod and pod not in _stateful(service, docs):
            there = set()
        if rest and not pod:  # of another namespace: its pods are not here, and may be reached
            there = _outside(rest.partition(".")[0], docs)
        if int(port) not in there:
            yield f"index.url names {place}, which is no Service here, nor may pods reach it elsewhere"


def _stateful(service: str, docs: Sequence[Doc]) -> set[str]:
    """Pods that have a name of their own under a headless Service."""
    sets = [doc for doc in docs if doc["kind"] == "StatefulSet" and doc["spec"]["serviceName"] == service]
    return {f"{doc['metadata']['name']}-{number}" for doc in sets for number in range(doc["spec"]["replicas"])}


def _outside(namespace: str, docs: Sequence[Doc]) -> set[int]:
    """Ports of another namespace that hosts may reach."""
    found = set()
    for policy in (doc["spec"] for doc in docs if doc["kind"] == "NetworkPolicy"):
        for rule in policy.get("egress", ()) if policy["podSelector"] else ():
            peers = [peer.get("namespaceSelector", {}).get("matchLabels", {}) for peer in rule["to"]]
            if {"kubernetes.io/metadata.name": namespace} in peers:
                found |= {port["port"] for port in rule["ports"]}
    return found


def sizes_fit(docs: Sequence[Doc]) -> Iterator[str]:
    config = config_of(docs)
    for pod in pods(docs):
        if pod.ray is None:
            continue
        limit = nbytes(pod.spec["containers"][0]["resources"]["limits"]["memory"])
        store = int(pod.ray["rayStartParams"]["object-store-memory"])
        if _limit(pod, "/dev/shm") < store:
            yield f"{pod.name}: /dev/shm is smaller than the object store"
        if not pod.caches:
            continue
        need = store + config.cpu.capacity + HEADROOM
        if limit < need:
            yield f"{pod.name}: {limit >> 20} MiB of memory for {need >> 20} MiB: arena, object store and processes"
        if _limit(pod, config.arena_dir) < config.cpu.capacity * 1.05:
            yield f"{pod.name}: the volume of the arena is smaller than cpu.capacity and its tables"
        room = _limit(pod, str(config.nvme.path))
        if "kvtier.nvme" in pod.ray["rayStartParams"]["resources"] and room < config.nvme.capacity * 1.05:
            yield f"{pod.name}: the volume of the NVMe tier is smaller than nvme.capacity and its file system"


def _limit(pod: Pod, path: str) -> float:
    """Bytes that the volume at this path may hold; no limit for a folder of the node."""
    for mount in sorted(pod.spec["containers"][0]["volumeMounts"], key=lambda mount: -len(mount["mountPath"])):
        if PurePosixPath(path).is_relative_to(mount["mountPath"]):
            volume = pod.volumes[mount["name"]]
            if "emptyDir" in volume:
                return nbytes(volume["emptyDir"]["sizeLimit"])
            if "ephemeral" in volume:
                return nbytes(volume["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"])
            return float("inf")
    return 0.0


def redis_forgets(docs: Sequence[Doc]) -> Iterator[str]:
    said = dict(line.split(maxsplit=1) for line in _redis_lines(docs))
    if said.get("save") != '""' or said.get("appendonly") != "no" or said.get("maxmemory-policy") != "allkeys-lru":
        yield "redis.conf: the index is soft state: no persistence, and old entries go"
    most = int(said["maxmemory"].removesuffix("mb")) << 20
    for pod in pods(docs):
        for container in pod.spec["containers"]:
            if container["name"] == "redis" and most > 0.8 * nbytes(container["resources"]["limits"]["memory"]):
                yield f"{pod.name}: maxmemory leaves less than a fifth of its limit for connections and fragments"


def _redis_lines(docs: Sequence[Doc]) -> list[str]:
    text = one(docs, "ConfigMap", "kvtier-redis")["data"]["redis.conf"]
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def ends_take_their_time(docs: Sequence[Doc]) -> Iterator[str]:
    drain = int(one(docs, "ConfigMap", "kvtier-ray")["data"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    for pod in pods(docs):
        if pod.caches and pod.spec.get("terminationGracePeriodSeconds", 30) < drain + 20:
            yield f"{pod.name}: is killed before its drain of {drain} s has ended"


def tls_is_whole(docs: Sequence[Doc]) -> Iterator[str]:
    ray = one(docs, "ConfigMap", "kvtier-ray")["data"]["RAY_USE_TLS"] == "1"
    config = config_of(docs)
    if ray != bool(config.fleet.cert):
        yield "TLS is on for Ray or for the fleet, and not for both"
    for pod in pods(docs):
        if pod.ray is None or not ray:
            continue
        for container in pod.spec["containers"]:
            said: dict[str, Any] = {one["name"]: one.get("value") for one in container.get("env", ())}
            files = [said.get(f"RAY_TLS_{name}") or "/nowhere" for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT")]
            yield from _unmounted(pod, container, files)


FITTING: tuple[Rule, ...] = (config_is_at_home, sizes_fit, redis_forgets, ends_take_their_time, tls_is_whole)
