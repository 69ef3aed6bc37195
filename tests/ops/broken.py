"""Ways to break the manifests of the overlay prod, each with what must be said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.ops.manifests import Doc, one


def ray(docs: list[Doc]) -> Doc:
    return one(docs, "RayCluster", "kvtier")["spec"]


def worker(docs: list[Doc], number: int = 1) -> Doc:
    return ray(docs)["workerGroupSpecs"][number]["template"]["spec"]


def head(docs: list[Doc]) -> Doc:
    return ray(docs)["headGroupSpec"]["template"]["spec"]


def redis(docs: list[Doc]) -> Doc:
    return one(docs, "Deployment", "kvtier-redis")["spec"]["template"]["spec"]


def container(docs: list[Doc]) -> Doc:
    return worker(docs)["containers"][0]


def volume(pod: Doc, name: str) -> Doc:
    return next(each for each in pod["volumes"] if each["name"] == name)


def mount(container: Doc, name: str) -> Doc:
    return next(each for each in container["volumeMounts"] if each["name"] == name)


def policy(docs: list[Doc], name: str) -> Doc:
    return one(docs, "NetworkPolicy", name)["spec"]


def match(docs: list[Doc], kind: str, name: str) -> Doc:
    return one(docs, kind, name)["spec"]["selector"]["matchLabels"]


def config(docs: list[Doc], old: str, new: str) -> None:
    _replace(one(docs, "ConfigMap", "kvtier-config")["data"], "kvtier.toml", old, new)


def redis_conf(docs: list[Doc], old: str, new: str) -> None:
    _replace(one(docs, "ConfigMap", "kvtier-redis")["data"], "redis.conf", old, new)


def _replace(data: dict[str, str], key: str, old: str, new: str) -> None:
    assert old in data[key]
    data[key] = data[key].replace(old, new)


Break = Callable[[list[Doc]], Any]
BROKEN: dict[str, tuple[str, Break]] = {
    # What schemas find.
    "schema: a number for a text": ("1.34", lambda d: redis(d)["containers"][0].update(image=3)),
    "schema: an unknown field": ("1.34", lambda d: one(d, "Service", "kvtier-redis")["spec"].update(selektor={})),
    "schema: a policy's type": ("1.34", lambda d: policy(d, "kvtier-deny").update(policyTypes="Ingress")),
    "schema: a budget": (
        "1.34",
        lambda d: one(d, "PodDisruptionBudget", "kvtier-cpu")["spec"].update(maxUnavailable=[1]),
    ),
    "schema: an account": (
        "1.34",
        lambda d: one(d, "ServiceAccount", "kvtier").update(automountServiceAccountToken="no"),
    ),
    "schema: a claim": (
        "1.34",
        lambda d: one(d, "PersistentVolumeClaim", "kvtier-head")["spec"].update(accessModes="RWO"),
    ),
    "schema: a map": ("1.34", lambda d: one(d, "ConfigMap", "kvtier-ray")["data"].update(RAY_USE_TLS=1)),
    "schema: a namespace": ("1.34", lambda d: one(d, "Namespace", "kvtier").update(labels={})),
    "schema: no quantity": ("quantity", lambda d: container(d)["resources"]["limits"].update(memory="88Gib")),
    "schema: no size": ("quantity", lambda d: volume(worker(d), "shm")["emptyDir"].update(sizeLimit="256 Mi")),
    "custom: Ray's parameters are texts": (
        "not of type 'string'",
        lambda d: ray(d)["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
    ),
    "custom: an unknown field": ("unexpected", lambda d: ray(d).update(autoscalerOption={})),
    "custom: a mode": ("not one of", lambda d: ray(d)["authOptions"].update(mode="tokens")),
    "custom: in a pod template": ("unexpected", lambda d: container(d).update(volumeMount=[])),
    "custom: a monitor": (
        "unexpected",
        lambda d: one(d, "PodMonitor", "kvtier")["spec"]["podMetricsEndpoints"][0].update(intervall="1s"),
    ),
    # What names are of.
    "a ConfigMap": ("names_exist", lambda d: volume(head(d), "config")["configMap"].update(name="kvtier-konfig")),
    "a key of a ConfigMap": ("names_exist", lambda d: one(d, "ConfigMap", "kvtier-ray")["data"].pop("RAY_USE_TLS")),
    "a Secret": ("names_exist", lambda d: volume(worker(d), "redis")["secret"].update(secretName="redis")),
    "a key of a Secret": ("names_exist", lambda d: volume(worker(d), "redis")["secret"]["items"][0].update(key="pass")),
    "a claim": ("names_exist", lambda d: volume(head(d), "gcs")["persistentVolumeClaim"].update(claimName="head")),
    "an account": ("names_exist", lambda d: worker(d).update(serviceAccountName="default")),
    "a volume": ("names_exist", lambda d: worker(d)["volumes"].remove(volume(worker(d), "shm"))),
    "a volume that nobody mounts": (
        "names_exist",
        lambda d: worker(d)["volumes"].append({"name": "x", "emptyDir": {}}),
    ),
    "two at one path": (
        "names_exist",
        lambda d: container(d)["volumeMounts"].append({"name": "tmp", "mountPath": "/dev/shm"}),
    ),
    # What is selected.
    "a Service's pods": (
        "selectors_match",
        lambda d: one(d, "Service", "kvtier-metrics")["spec"]["selector"].update(x="y"),
    ),
    "a budget's pods": (
        "selectors_match",
        lambda d: match(d, "PodDisruptionBudget", "kvtier-gpu").update({"ray.io/group": "gpus"}),
    ),
    "a policy's peers": (
        "selectors_match",
        lambda d: policy(d, "kvtier-redis")["ingress"][0]["from"][0]["podSelector"].update(matchLabels={"a": "b"}),
    ),
    "a monitor's pods": ("selectors_match", lambda d: match(d, "PodMonitor", "kvtier").update(a="b")),
    "a Deployment's pods": (
        "selectors_match",
        lambda d: match(d, "Deployment", "kvtier-redis").update(a="b"),
    ),
    # Where somebody listens.
    "a Service's port": (
        "ports_listen",
        lambda d: one(d, "Service", "kvtier-status")["spec"]["ports"][0].update(targetPort="web"),
    ),
    "a monitor's port": ("ports_listen", lambda d: container(d)["ports"].pop(0)),
    "a probe's port": ("probes_ask_ports", lambda d: container(d)["readinessProbe"]["httpGet"].update(port="ready")),
    "a policy's port": (
        "ports_listen",
        lambda d: policy(d, "kvtier-metrics")["ingress"][0]["ports"][0].update(port=80),
    ),
    "a probe that runs a command": (
        "probes_run_nothing",
        lambda d: redis(d)["containers"][0].update(livenessProbe={"exec": {"command": ["redis-cli"]}}),
    ),
    "no probe": ("probes_run_nothing", lambda d: container(d).pop("readinessProbe")),
    # What may be done.
    "the latest image": ("images_are_named", lambda d: container(d).update(image="registry.example/kvtier:latest")),
    "an image without a tag": ("images_are_named", lambda d: container(d).update(image="registry.example:5000/kvtier")),
    "the node's network": ("no_pod_may", lambda d: worker(d).update(hostNetwork=True)),
    "the node's memory": ("no_pod_may", lambda d: worker(d).update(hostIPC=True)),
    "processes of a host": ("no_pod_may", lambda d: worker(d).update(shareProcessNamespace=True)),
    "root": ("no_pod_may", lambda d: worker(d)["securityContext"].update(runAsUser=0)),
    "a token": ("no_pod_may", lambda d: redis(d).pop("automountServiceAccountToken")),
    "no seccomp": ("no_pod_may", lambda d: redis(d)["securityContext"].pop("seccompProfile")),
    "a root container": ("no_container_may", lambda d: container(d)["securityContext"].update(runAsUser=0)),
    "a container that writes": (
        "no_container_may",
        lambda d: container(d)["securityContext"].pop("readOnlyRootFilesystem"),
    ),
    "a capability": (
        "no_container_may",
        lambda d: container(d)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
    ),
    "privileges": ("no_container_may", lambda d: container(d)["securityContext"].update(allowPrivilegeEscalation=True)),
    "no limits": ("no_container_may", lambda d: container(d)["resources"].pop("limits")),
    # What kvtier.toml says.
    "an unknown name in kvtier.toml": ("unknown name", lambda d: config(d, "capacity", "kapacity")),
    "a folder that is not mounted": ("config_is_at_home", lambda d: config(d, "/var/lib/kvtier/nvme", "/mnt/nvme")),
    "a password that is not mounted": ("config_is_at_home", lambda d: config(d, "/etc/kvtier/redis/", "/etc/redis/")),
    "a certificate that is not mounted": (
        "config_is_at_home",
        lambda d: config(d, "/etc/kvtier/tls/ca.crt", "/etc/ca.crt"),
    ),
    "another port for metrics": ("config_is_at_home", lambda d: config(d, "port = 9400", "port = 9410")),
    "another port for the page": ("config_is_at_home", lambda d: config(d, "port = 9401", "port = 9411")),
    "another port for peers": ("config_is_at_home", lambda d: config(d, "port = 7080", "port = 7081")),
    "another port for clients": ("config_is_at_home", lambda d: config(d, "0.0.0.0:7070", "0.0.0.0:7077")),
    "an index that is nowhere": ("config_is_at_home", lambda d: config(d, "@kvtier-redis:6379", "@redis:6379")),
    "hosts that are not chosen": ("config_is_at_home", lambda d: ray(d)["workerGroupSpecs"][1].update(labels={})),
    "tiers on the head": ("config_is_at_home", lambda d: config(d, 'labels = "kvtier.io/cache=true"', "")),
    # What fits into what.
    "an arena beyond the pod's memory": (
        "sizes_fit",
        lambda d: container(d)["resources"]["limits"].update(memory="64Gi"),
    ),
    "an object store beyond /dev/shm": (
        "sizes_fit",
        lambda d: volume(worker(d), "shm")["emptyDir"].update(sizeLimit="64Mi"),
    ),
    "blocks beyond the disk": ("sizes_fit", lambda d: config(d, '"800GiB"', '"900GiB"')),
    "a Redis that keeps": ("redis_forgets", lambda d: redis_conf(d, "appendonly no", "appendonly yes")),
    "a Redis that evicts nothing": ("redis_forgets", lambda d: redis_conf(d, "allkeys-lru", "noeviction")),
    "a Redis beyond its limit": ("redis_forgets", lambda d: redis_conf(d, "768mb", "1024mb")),
    "an end that is cut short": ("ends_take_their_time", lambda d: worker(d).update(terminationGracePeriodSeconds=30)),
    "TLS for half of it": ("tls_is_whole", lambda d: one(d, "ConfigMap", "kvtier-ray")["data"].update(RAY_USE_TLS="0")),
    "TLS without its files": (
        "tls_is_whole",
        lambda d: mount(head(d)["containers"][1], "tls").update(mountPath="/tls"),
    ),
}
