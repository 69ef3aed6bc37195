"""Manifests as kustomize renders them, and their pods as KubeRay and the controllers of Kubernetes make them."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
SCHEMAS = ROOT.parent / "shared" / "k8s_schemas"
OVERLAYS = sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml"))
EXAMPLE = K8S / "examples" / "vllm"
Doc = dict[str, Any]


class UniqueLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML else takes the last."""


def _mapping(loader: UniqueLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        name = loader.construct_object(key, deep=True)
        if name in seen:
            raise yaml.YAMLError(f"duplicate key {name!r}{key.start_mark}")
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


UniqueLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def documents(text: str) -> list[Doc]:
    return [doc for doc in yaml.load_all(text, UniqueLoader) if doc]


@functools.cache
def text_of(folder: Path) -> str:
    """What `kubectl kustomize FOLDER` says; kubectl is PyPI's, in this environment."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(folder: str | Path) -> list[Doc]:
    """Documents of a folder, or of the overlay of this name; new ones at each call."""
    return documents(text_of(folder if isinstance(folder, Path) else K8S / "overlays" / folder))


def combined(folder: Path, *components: str, config: str = "") -> list[Doc]:
    """The overlay dev with these components, and with another kvtier.toml if one is given."""
    shutil.copy(K8S / "overlays/dev/images.yaml", folder)
    there = os.path.relpath(K8S, folder)
    said = {
        "namespace": "kvtier",
        "resources": [f"{there}/overlays/dev"],
        "components": [f"{there}/components/{name}" for name in components],
        "configurations": ["images.yaml"],
        "images": [{"name": "kvtier", "newName": "registry.example/kvtier", "newTag": "0.1.0-cpu"}],
    }
    if config:
        (folder / "kvtier.toml").write_text(config)
        said["configMapGenerator"] = [{"name": "kvtier-config", "behavior": "replace", "files": ["kvtier.toml"]}]
        said["generatorOptions"] = {"disableNameSuffixHash": True}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(said))
    text_of.cache_clear()  # the folder may have been another one before
    return rendered(folder)


def with_sentinels(folder: Path) -> list[Doc]:
    """The overlay dev with the component redis-sentinel, and the index's address as that says."""
    said = (K8S / "components/redis-sentinel/kustomization.yaml").read_text()
    (address,) = re.findall(r'"(redis\+sentinel://.*)"', said)
    text = (K8S / "base/kvtier.toml").read_text()
    return combined(folder, "redis-sentinel", config=re.sub(r'(?m)^url = ".*"', f'url = "{address}"', text))


def one(docs: Sequence[Doc], kind: str, name: str) -> Doc:
    (found,) = (doc for doc in docs if doc["kind"] == kind and doc["metadata"]["name"] == name)
    return found


@dataclass(frozen=True)
class Pod:
    """A pod template, as its pods will be.

    Attributes:
        name: of it, for people.
        namespace: of its object.
        labels: that its pods have.
        spec: of its pods.
        ray: the group of a RayCluster that it is of; None for others.
    """

    name: str
    namespace: str
    labels: dict[str, str]
    spec: Doc
    ray: Doc | None = None

    @property
    def containers(self) -> list[Doc]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        ports = (port for container in self.spec["containers"] for port in container.get("ports", ()))
        return {port["name"]: port["containerPort"] for port in ports}

    @property
    def volumes(self) -> dict[str, Doc]:
        return {volume["name"]: volume for volume in self.spec.get("volumes", ())}

    @property
    def caches(self) -> bool:
        """Whether tiers run in it."""
        return self.ray is not None and self.labels["ray.io/node-type"] == "worker"


def pods(docs: Sequence[Doc]) -> Iterator[Pod]:
    for doc in docs:
        spec, meta = doc.get("spec") or {}, doc["metadata"]
        where = (meta["name"], meta.get("namespace", ""))
        if doc["kind"] in ("Deployment", "StatefulSet", "DaemonSet"):
            yield Pod(*where, spec["template"]["metadata"]["labels"], spec["template"]["spec"])
        if doc["kind"] == "RayCluster":
            groups = [("head", "headgroup", spec["headGroupSpec"])]
            groups += [("worker", group["groupName"], group) for group in spec.get("workerGroupSpecs", ())]
            for kind, name, group in groups:
                own = group["template"].get("metadata", {}).get("labels", {})
                labels = {
                    "ray.io/cluster": meta["name"],
                    "ray.io/node-type": kind,
                    "ray.io/group": name,
                    "ray.io/is-ray-node": "yes",
                }
                yield Pod(f"{meta['name']}-{name}", where[1], own | labels, group["template"]["spec"], group)
