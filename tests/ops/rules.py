"""What no schema says: that names are there, ports are those that listen, sizes fit, and nobody may more than he needs.

Each rule takes all documents of an overlay, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtier.errors import ConfigError
from tests.ops.fitting import FITTING, Rule
from tests.ops.manifests import Doc, Pod, pods

SECRETS = {
    "kvtier": {"auth_token"},  # made by KubeRay
    "kvtier-redis": {"password", "internal", "users.acl", "sentinel.acl"},
    "kvtier-status": {"token"},
    "kvtier-ca": {"ca.crt", "ca.key"},
    "kvtier-tokens": {"tokens.json"},
}
"""That docs/kubernetes.md has one make, with their keys."""
ROOTS = {"own-shared", "own-nvme"}
"""Init containers that give a folder of the node to the user of the others."""


def names_exist(docs: Sequence[Doc]) -> Iterator[str]:
    maps = {doc["metadata"]["name"]: set(doc["data"]) for doc in docs if doc["kind"] == "ConfigMap"}
    there = {kind: {doc["metadata"]["name"] for doc in docs if doc["kind"] == kind} for kind in _kinds(docs)}
    for pod in pods(docs):
        yield from _sources(pod, maps)
        account = pod.spec.get("serviceAccountName")
        if account not in there.get("ServiceAccount", ()):
            yield f"{pod.name}: there is no ServiceAccount {account}"
        for name, volume in pod.volumes.items():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and claim not in there.get("PersistentVolumeClaim", ()):
                yield f"{pod.name}: volume {name} is of the claim {claim}, which is not there"
        mounted = [mount["name"] for container in pod.containers for mount in container.get("volumeMounts", ())]
        yield from (f"{pod.name}: {name} is mounted and no volume" for name in {*mounted} - {*pod.volumes})
        yield from (f"{pod.name}: volume {name} is mounted nowhere" for name in {*pod.volumes} - {*mounted})
        for container in pod.containers:
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
            if len(paths) != len({*paths}):
                yield f"{pod.name}: {container['name']} mounts twice at one path"


def _kinds(docs: Sequence[Doc]) -> set[str]:
    return {doc["kind"] for doc in docs}


def _sources(pod: Pod, maps: dict[str, set[str]]) -> Iterator[str]:
    """ConfigMaps and Secrets that a pod names, with their keys."""
    asked: list[tuple[dict[str, set[str]], str, str]] = []
    for volume in pod.volumes.values():
        for known, source, field in ((maps, "configMap", "name"), (SECRETS, "secret", "secretName")):
            if source in volume:
                keys = [item["key"] for item in volume[source].get("items", ())] or [""]
                asked += [(known, volume[source][field], key) for key in keys]
    for container in pod.containers:
        for variable in container.get("env", ()):
            for known, source in ((maps, "configMapKeyRef"), (SECRETS, "secretKeyRef")):
                if reference := variable.get("valueFrom", {}).get(source):
                    asked.append((known, reference["name"], reference["key"]))
    for known, name, key in asked:
        if name not in known or (key and key not in known[name]):
            what = "ConfigMap" if known is maps else "Secret that is documented"
            yield f"{pod.name}: there is no {what} {name} with {key or 'anything'}"


def selectors_match(docs: Sequence[Doc]) -> Iterator[str]:
    everything = list(pods(docs))
    for doc in docs:
        kind, spec = doc["kind"], doc.get("spec") or {}
        name = f"{kind} {doc['metadata']['name']}"
        if kind == "Service":
            selectors = [{"matchLabels": spec["selector"]}]
        elif kind == "NetworkPolicy":
            rules = [*spec.get("ingress", ()), *spec.get("egress", ())]
            others = [peer for rule in rules for peer in (*rule.get("from", ()), *rule.get("to", ()))]
            own = [peer["podSelector"] for peer in others if "podSelector" in peer and "namespaceSelector" not in peer]
            # Pods that may look at the status page are the reader's.
            own = [one for one in own if "kvtier.io/status" not in one.get("matchLabels", {})]
            selectors = [spec["podSelector"], *own]
        elif kind in ("PodDisruptionBudget", "PodMonitor", "Deployment", "StatefulSet"):
            selectors = [spec["selector"]]
        else:
            continue
        for selector in selectors:
            if not _selected(selector, everything):
                yield f"{name}: {selector} matches no pod"


def _selected(selector: Doc, everything: Sequence[Pod]) -> list[Pod]:
    wanted = selector.get("matchLabels", {}).items()
    return [pod for pod in everything if wanted <= pod.labels.items()]


def probes_ask_ports_with_names(docs: Sequence[Doc]) -> Iterator[str]:
    for pod in pods(docs):
        for container in pod.spec["containers"]:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                port = next((how["port"] for how in _how(container.get(probe, {}))), 0)
                if isinstance(port, str) and port not in pod.ports:
                    yield f"{pod.name}: {probe} asks the port {port}, which no container names"


def ports_listen(docs: Sequence[Doc]) -> Iterator[str]:
    everything = list(pods(docs))
    for doc in docs:
        name, spec = f"{doc['kind']} {doc['metadata']['name']}", doc.get("spec") or {}
        if doc["kind"] == "Service":
            for pod in _selected({"matchLabels": spec["selector"]}, everything):
                wrong = [port for port in spec["ports"] if pod.ports.get(port["targetPort"]) != port["port"]]
                yield from (f"{name}: {pod.name} has no port {port['targetPort']} {port['port']}" for port in wrong)
        if doc["kind"] == "PodMonitor":
            for pod in _selected(spec["selector"], everything):
                missing = {end["port"] for end in spec["podMetricsEndpoints"]} - {*pod.ports}
                yield from (f"{name}: {pod.name} names no port {port}" for port in missing)
        if doc["kind"] == "NetworkPolicy":
            listening = {port for pod in _selected(spec["podSelector"], everything) for port in pod.ports.values()}
            opened = {port["port"] for rule in spec.get("ingress", ()) for port in rule.get("ports", ())}
            yield from (f"{name}: nobody listens at {port}" for port in opened - listening)


def _how(probe: Doc) -> list[Doc]:
    return [probe[how] for how in ("httpGet", "tcpSocket") if how in probe]


def probes_run_nothing(docs: Sequence[Doc]) -> Iterator[str]:
    for pod in pods(docs):
        for container in pod.spec["containers"]:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if "exec" in container.get(probe, {}):
                    yield f"{pod.name}: {probe} of {container['name']} runs a command; ask a port"
        if pod.caches and not pod.spec["containers"][0].get("readinessProbe"):
            yield f"{pod.name}: nobody is told whether it serves"


def images_are_named(docs: Sequence[Doc]) -> Iterator[str]:
    for pod in pods(docs):
        for container in pod.containers:
            image = container["image"]
            tag = image.rpartition("/")[2].partition(":")[2]
            if not (tag or "@sha256:" in image) or tag == "latest":
                yield f"{pod.name}: the image {image} has no tag that stays"


def no_pod_may_more_than_it_needs(docs: Sequence[Doc]) -> Iterator[str]:
    for pod in pods(docs):
        asked = {key for key in ("hostNetwork", "hostIPC", "hostPID", "shareProcessNamespace") if pod.spec.get(key)}
        head = pod.ray is not None and not pod.caches
        yield from (f"{pod.name}: {key}" for key in asked - ({"shareProcessNamespace"} if head else set()))
        context = pod.spec.get("securityContext", {})
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.name}: has a token for the API server"
        if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
            yield f"{pod.name}: may run as root"
        if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{pod.name}: has no seccomp profile"


def no_container_may_more_than_it_needs(docs: Sequence[Doc]) -> Iterator[str]:
    for pod in pods(docs):
        for container in pod.containers:
            own = container.get("securityContext", {})
            root = own.get("runAsUser", 1) == 0 or own.get("runAsNonRoot") is False
            capabilities = own.get("capabilities", {})
            name = f"{pod.name}: {container['name']}"
            if root and not (container["name"] in ROOTS and container in pod.spec.get("initContainers", ())):
                yield f"{name} runs as root"
            if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
                yield f"{name} may gain privileges"
            if own.get("readOnlyRootFilesystem") is not True:
                yield f"{name} may write to its image"
            if capabilities.get("drop") != ["ALL"] or (capabilities.get("add") and container["name"] not in ROOTS):
                yield f"{name} has capabilities"
            if not {"requests", "limits"} <= container.get("resources", {}).keys():
                yield f"{name} has no requests and limits"


def prod_is_guaranteed(docs: Sequence[Doc]) -> Iterator[str]:
    """For overlays that say so: pods whose requests equal limits are the last to be evicted."""
    for pod in pods(docs):
        for container in pod.spec["containers"]:
            if pod.ray is not None and container["resources"]["requests"] != container["resources"]["limits"]:
                yield f"{pod.name}: requests of {container['name']} are not its limits"


RULES: tuple[Rule, ...] = (
    names_exist,
    selectors_match,
    probes_ask_ports_with_names,
    ports_listen,
    probes_run_nothing,
    images_are_named,
    no_pod_may_more_than_it_needs,
    no_container_may_more_than_it_needs,
    *FITTING,
)


def broken(docs: Sequence[Doc]) -> list[str]:
    """What is wrong by any rule; of one that cannot be held against these documents, why not."""
    found = []
    for rule in RULES:
        try:
            found += [f"{rule.__name__}: {fault}" for fault in rule(docs)]
        except (KeyError, ConfigError) as exc:
            found.append(f"{rule.__name__}: {exc!r}")
    return found
