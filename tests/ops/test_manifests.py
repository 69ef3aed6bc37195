"""The manifests: what schemas say of them, what our own rules do, and that both find what is broken."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.ops.broken import BROKEN
from tests.ops.fitting import config_of
from tests.ops.manifests import (
    EXAMPLE,
    K8S,
    OVERLAYS,
    SCHEMAS,
    UniqueLoader,
    combined,
    documents,
    one,
    pods,
    rendered,
    text_of,
    with_sentinels,
)
from tests.ops.rules import (
    RULES,
    broken,
    images_are_named,
    names_exist,
    no_container_may_more_than_it_needs,
    no_pod_may_more_than_it_needs,
    probes_ask_ports_with_names,
    prod_is_guaranteed,
    selectors_match,
)
from tests.ops.schemas import custom, faults

BIN = Path(sys.executable).parent
SCRIPTS = sorted(K8S.rglob("*.sh"))
SOURCES = sorted(path for path in K8S.rglob("*.y*ml") if "dashboard" not in path.name)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_well(overlay):
    docs = rendered(overlay)
    assert {doc["kind"] for doc in docs} >= {"RayCluster", "Deployment", "ConfigMap", "NetworkPolicy", "Namespace"}
    found = {f"{doc['kind']} {doc['metadata']['name']}": faults(doc) for doc in docs}
    assert {name: said for name, said in found.items() if said} == {}
    assert broken(docs) == []


def test_the_example_with_vllm_meets_prod():
    docs = rendered(EXAMPLE)
    assert [fault for doc in docs for fault in faults(doc)] == []
    rules = (images_are_named, no_pod_may_more_than_it_needs, no_container_may_more_than_it_needs, names_exist)
    assert [fault for rule in (*rules, selectors_match, probes_ask_ports_with_names) for fault in rule(docs)] == []
    prod = rendered("prod")
    (engine,) = pods(docs)
    (container,) = engine.spec["containers"]
    hosts = [pod for pod in pods(prod) if pod.caches]
    assert hosts
    for host in hosts:
        # The same folder of the node, under the same path; another user, in a group that kvtier gives its arena to.
        assert host.volumes["shared"]["hostPath"]["path"] == engine.volumes["shared"]["hostPath"]["path"]
        for each in (host.spec["containers"][0], container):
            (path,) = (mount["mountPath"] for mount in each["volumeMounts"] if mount["name"] == "shared")
            assert path == "/run/kvtier"
        mine, its = engine.spec["securityContext"], host.spec["securityContext"]
        assert mine["runAsUser"] != its["runAsUser"]
        assert mine["runAsGroup"] in its["supplementalGroups"]
        wanted = engine.spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
        assert wanted["labelSelector"]["matchLabels"].items() <= host.labels.items()
        assert wanted["namespaces"] == [host.namespace]
    said = json.loads(container["args"][1])
    assert said["kv_connector_extra_config"]["target"] == str(config_of(prod).socket)
    assert said["kv_connector_module_path"] == "kvtier.connectors.vllm"


def test_custom_kinds_have_schemas():
    if not SCHEMAS.is_dir():
        pytest.skip("no schemas of KubeRay and of the operator of Prometheus at ../shared/k8s_schemas")
    kinds = {doc["kind"] for doc in rendered("prod") if custom(doc)}
    assert kinds == {"RayCluster", "PodMonitor", "PrometheusRule"}
    assert all((SCHEMAS / group).is_dir() for group in ("ray.io", "monitoring.coreos.com"))


def test_prod_has_what_is_asked_of_it():
    docs = rendered("prod")
    assert list(prod_is_guaranteed(docs)) == []
    assert one(docs, "RayCluster", "kvtier")["spec"]["authOptions"] == {"mode": "token"}
    groups = one(docs, "RayCluster", "kvtier")["spec"]["workerGroupSpecs"]
    assert [group["groupName"] for group in groups if group["replicas"]] == ["nvme", "gpu"]
    assert one(docs, "ConfigMap", "kvtier-ray")["data"]["RAY_USE_TLS"] == "1"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(K8S)))
def test_no_key_stands_twice(source):
    assert documents(source.read_text()), "nothing in it"


def test_a_key_that_stands_twice_is_found():
    with pytest.raises(yaml.YAMLError, match="duplicate key 'a'"):
        yaml.load("a: 1\nb: 2\na: 3\n", UniqueLoader)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(K8S)))
def test_scripts_are_plain_sh(script):
    """As the images' own shell reads it: Debian's dash, or busybox."""
    assert script.read_text().startswith("#!/bin/sh\n")
    checked = subprocess.run([BIN / "shellcheck", script], capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stdout


def test_a_base_that_is_not_there_is_found(tmp_path: Path):
    (tmp_path / "kustomization.yaml").write_text("resources: [../gone]\n")
    with pytest.raises(AssertionError, match="gone"):
        text_of(tmp_path)


COMBINED = {
    "nvme-hostpath": ("nvme-hostpath",),
    "nvme-hostpath and gpu": ("nvme-hostpath", "gpu"),
    "gpu before shared memory": ("gpu", "shared-memory"),
    "prometheus": ("prometheus",),
}


@pytest.mark.parametrize("components", COMBINED.values(), ids=COMBINED)
def test_components_go_together(components, tmp_path):
    """Each with the base's own kvtier.toml."""
    docs = combined(tmp_path, *components)
    assert [fault for doc in docs for fault in faults(doc)] == []
    assert broken(docs) == []


def test_sentinels_take_the_place_of_the_redis_of_the_base(tmp_path):
    assert any("index.url names kvtier-redis" in fault for fault in broken(combined(tmp_path, "redis-sentinel")))
    docs = with_sentinels(tmp_path)
    assert [fault for doc in docs for fault in faults(doc)] == []
    assert broken(docs) == []
    assert {doc["kind"] for doc in docs if doc["metadata"]["name"] == "kvtier-redis"} == {"ConfigMap"}
    servers = one(docs, "StatefulSet", "kvtier-sentinel")["spec"]
    servers["replicas"] = 2
    assert any("index.url names kvtier-sentinel-2" in fault for fault in broken(docs))
    servers["replicas"] = 3
    one(docs, "Service", "kvtier-sentinel")["spec"]["ports"].pop()
    assert any("index.url names kvtier-sentinel-0" in fault for fault in broken(docs))


@pytest.mark.parametrize(("words", "change"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_found(request, words, change):
    if "custom:" in request.node.callspec.id and not SCHEMAS.is_dir():
        pytest.skip("no schemas of KubeRay and of the operator of Prometheus at ../shared/k8s_schemas")
    docs = copy.deepcopy(rendered("prod"))
    change(docs)
    by_schema = ":" in request.node.callspec.id
    found = [fault for doc in docs for fault in faults(doc)] if by_schema else broken(docs)
    assert any(words in fault for fault in found), found


def test_every_rule_has_something_broken():
    named = {words for words, _ in BROKEN.values()}
    assert [rule.__name__ for rule in RULES if not any(rule.__name__.startswith(words) for words in named)] == []
