"""The dashboard: its queries name what there is, its panels stand side by side and say what they show."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest

from tests.ops.manifests import one, rendered
from tests.ops.monitoring import MONITORING, dashboard, everything, panels, script
from tests.ops.promql import Known, Wrong, labels

UNITS = {"percentunit", "bytes", "binBps", "s", "cps", "short", "none", "bool"}
"""Of Grafana's, those that its panels have; `percentunit` is a ratio, `cps` counts a second."""
KINDS = {"timeseries", "bargauge", "row"}
VARIABLES = {"datasource", "job", "host"}


def faults(found: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a dashboard."""
    known = everything()
    ids = [panel["id"] for panel in found["panels"]]
    if len(ids) != len(set(ids)):
        yield "two panels have the same id"
    titles = [panel["title"] for panel in found["panels"]]
    if len(titles) != len(set(titles)):
        yield "two panels have the same title"
    if {variable["name"] for variable in found["templating"]["list"]} != VARIABLES:
        yield "a variable is missing, or one too many"
    yield from _places(found["panels"])
    for panel in panels(found):
        yield from (f"{panel['title']}: {fault}" for fault in _panel(panel, known))


def _places(placed: list[dict[str, Any]]) -> Iterator[str]:
    for panel in placed:
        place = panel["gridPos"]
        if place["x"] < 0 or min(place["w"], place["h"]) < 1 or place["x"] + place["w"] > 24:
            yield f"{panel['title']} is outside of the grid"
    for left, right in combinations(placed, 2):
        a, b = left["gridPos"], right["gridPos"]
        across = a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"]
        if across and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]:
            yield f"{left['title']} and {right['title']} overlap"


def _panel(panel: dict[str, Any], known: Known) -> Iterator[str]:
    if panel["type"] not in KINDS:
        yield f"no panel is a {panel['type']}"
    if panel["fieldConfig"]["defaults"].get("unit") not in UNITS:
        yield "no unit, or one that Grafana does not know"
    if not panel.get("description", "").endswith("."):
        yield "nothing says what it means"
    if not panel["targets"]:
        yield "shows nothing"
    letters = [target["refId"] for target in panel["targets"]]
    if len(letters) != len(set(letters)):
        yield "two queries have the same letter"
    for target in panel["targets"]:
        if {panel["datasource"]["uid"], target["datasource"]["uid"]} != {"${datasource}"}:
            yield "asks another Prometheus than the one that is chosen"
        yield from _query(target, known)


def _query(target: dict[str, Any], known: Known) -> Iterator[str]:
    if not re.search(r'job=~"\$job"', target["expr"]):
        yield f"{target['expr']}: shows what is not chosen"
    try:
        there = labels(target["expr"], known)
    except Wrong as exc:
        yield str(exc)
        return
    named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    if not target["legendFormat"] or named - there:
        yield f"a legend names {named}, of {sorted(there)}"


def test_nothing_is_wrong_with_it():
    assert list(faults(dashboard())) == []


def test_it_is_made_of_its_panels():
    assert (MONITORING / "dashboard.json").read_text() == script().written(), (
        "python k8s/monitoring/dashboard.py writes it anew"
    )


def test_how_full_the_tiers_are_comes_first():
    first, second = dashboard()["panels"][:2]
    assert first["type"] == "row"
    assert [target["expr"] for target in second["targets"]] == [
        'kvtier:tier_utilization:ratio{job=~"$job", host=~"$host"}'
    ]


def test_variables_ask_the_one_that_is_chosen():
    known = everything()
    source, *others = dashboard()["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    for variable in others:
        assert variable["datasource"]["uid"] == "${datasource}"
        series, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]).groups()
        assert label == variable["name"]
        assert label in labels(series, known)


def _first(found: dict[str, Any]) -> dict[str, Any]:
    return next(panels(found))


def _expr(found: dict[str, Any], expr: str) -> None:
    _first(found)["targets"][0]["expr"] = expr


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "id": (lambda d: d["panels"][3].update(id=1), "the same id"),
    "title": (lambda d: d["panels"][3].update(title="Tiers"), "the same title"),
    "overlap": (lambda d: d["panels"][2]["gridPos"].update(x=4), "overlap"),
    "too wide": (lambda d: d["panels"][3]["gridPos"].update(w=20), "outside of the grid"),
    "variable": (lambda d: d["templating"]["list"].pop(), "a variable is missing"),
    "unit": (lambda d: _first(d)["fieldConfig"]["defaults"].pop("unit"), "no unit"),
    "text": (lambda d: _first(d).update(description=""), "what it means"),
    "source": (lambda d: _first(d)["targets"][0].update(datasource={"uid": "P1"}), "another Prometheus"),
    "not chosen": (lambda d: _expr(d, "kvtier_leases"), "not chosen"),
    "syntax": (lambda d: _expr(d, 'sum(kvtier_leases{job=~"$job"}'), "unclosed left parenthesis"),
    "metric": (lambda d: _expr(d, 'kvtier_tier_bytes{job=~"$job"}'), "there is no kvtier_tier_bytes"),
    "label": (lambda d: _expr(d, 'kvtier_leases{job=~"$job", tier="cpu"}'), "there is no label tier"),
    "legend": (lambda d: _first(d)["targets"][0].update(legendFormat="{{device}}"), "a legend names"),
    "empty": (lambda d: _first(d).update(targets=[]), "shows nothing"),
    "kind": (lambda d: _first(d).update(type="graph"), "no panel is a graph"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_is_found(what):
    change, why = BROKEN[what]
    found = copy.deepcopy(dashboard())
    change(found)
    assert any(why in fault for fault in faults(found)), list(faults(found))


def test_kustomize_gives_the_operator_and_grafana_what_is_here():
    docs = rendered(MONITORING)
    held = one(docs, "ConfigMap", "kvtier-dashboard")
    assert held["data"]["dashboard.json"] == (MONITORING / "dashboard.json").read_text()
    assert held["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert sorted(doc["metadata"]["name"] for doc in docs if doc["kind"] == "PrometheusRule") == [
        "kvtier-alerts",
        "kvtier-rules",
    ]
    assert len(docs) == 3
