"""Rules, alerts and dashboard as they lie in k8s/monitoring, and what Prometheus' own tools say of them."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from kvtier_services.monitor.metrics import METRICS
from tests.ops.manifests import UniqueLoader
from tests.ops.promql import Known, Wrong, labels

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "k8s" / "monitoring"
CASES = Path(__file__).parent / "alerts"
RUNBOOKS = ROOT / "docs" / "runbooks.md"
FILES = ("rules", "alerts")
OF_PROMETHEUS = frozenset(("job", "instance"))
"""Labels that Prometheus gives to all that it scrapes."""
ENDS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}

Rule = dict[str, Any]
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool (Debian: prometheus)"
)


def groups(name: str) -> list[dict[str, Any]]:
    """Groups of rules in a file of k8s/monitoring, new at each call."""
    resource = yaml.load((MONITORING / f"{name}.yaml").read_text(), UniqueLoader)
    return resource["spec"]["groups"]


def rules(*names: str) -> list[Rule]:
    return [rule for name in names or FILES for group in groups(name) for rule in group["rules"]]


ALERTS: list[Rule] = rules("alerts")


def plain(folder: Path, name: str, found: list[dict[str, Any]] | None = None) -> Path:
    """Write groups as Prometheus reads them."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"groups": groups(name) if found is None else found}))
    return path


def promtool(*args: str | Path, given: str | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(["promtool", *args], input=given, capture_output=True, text=True, check=False, timeout=120)


def exported() -> Known:
    """Labels of each series that the exporter can have, from its table."""
    known = {
        metric.name + end: frozenset((*metric.labels, "host", *(("le",) if end == "_bucket" else ()))) | OF_PROMETHEUS
        for metric in METRICS
        for end in ENDS[metric.kind]
    }
    known |= {name: OF_PROMETHEUS | {"host"} for name in ("process_resident_memory_bytes", "process_cpu_seconds_total")}
    return known


def recorded(known: Known, found: list[Rule]) -> Known:
    """Those, and the ones that recording rules make of them; a rule sees only those before it.

    Raises:
        Wrong: a rule names what there is not.
    """
    more = dict(known)
    for rule in found:
        if rule["record"] in more:
            raise Wrong(f"{rule['record']} is recorded twice")
        more[rule["record"]] = labels(rule["expr"], more)
    return more


def everything() -> Known:
    """All series that alerts and panels may name."""
    known = dict(recorded(exported(), rules("rules")))
    alerts = frozenset().union(*(labels(alert["expr"], known) for alert in ALERTS))
    return known | {"up": OF_PROMETHEUS, "ALERTS": alerts | {"alertname", "alertstate", "severity"}}


def used(template: str) -> set[str]:
    """Labels that an annotation names."""
    return set(re.findall(r"\$labels\.(\w+)", template))


@functools.cache
def script() -> ModuleType:
    """What makes the dashboard."""
    spec = importlib.util.spec_from_file_location("kvtier_dashboard", MONITORING / "dashboard.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def dashboard() -> dict[str, Any]:
    return json.loads((MONITORING / "dashboard.json").read_text())


def panels(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Those that show something."""
    return (panel for panel in found["panels"] if panel["type"] != "row")
