"""Write dashboard.json out of panels.yaml, both beside this file: `python k8s/monitoring/dashboard.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
FILE = HERE / "dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = 'job=~"$job", host=~"$host"'
COLUMNS, HEIGHT = 24, 8
"""Of Grafana's grid; and rows of it that a panel takes."""
WIDTH = 8
DASHED = ("ceiling", "capacity")
"""Series whose legends end so are no parts of the whole, but what it may reach."""

Panel = Mapping[str, Any]


def dashboard(rows: Mapping[str, Sequence[Panel]]) -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "uid": "kvtier",
        "title": "kvtier",
        "description": "Tiers of attention KV: how full, how useful, and how well.",
        "tags": ["kvtier"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": list(_placed(rows)),
    }


def _variables() -> list[dict[str, Any]]:
    chosen = {"type": "query", "datasource": SOURCE, "multi": True, "includeAll": True, "refresh": 2, "sort": 1}
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {**chosen, "name": "job", "label": "Fleet", "query": "label_values(kvtier_build_info, job)"},
        {**chosen, "name": "host", "label": "Host", "query": 'label_values(kvtier_build_info{job=~"$job"}, host)'},
    ]


def _placed(rows: Mapping[str, Sequence[Panel]]) -> Iterator[dict[str, Any]]:
    """Panels of Grafana, numbered, from left to right and from top to bottom."""
    number = y = 0
    for title, panels in rows.items():
        number += 1
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        x, y = 0, y + 1
        for panel in panels:
            number += 1
            width = panel.get("width", WIDTH)
            if x + width > COLUMNS:
                x, y = 0, y + HEIGHT
            yield {"id": number, **_drawn(panel), "gridPos": {"x": x, "y": y, "w": width, "h": HEIGHT}}
            x += width
        y += HEIGHT


def _drawn(panel: Panel) -> dict[str, Any]:
    bars = panel.get("bars", False)
    defaults: dict[str, Any] = {"unit": panel["unit"], "min": 0}
    if "most" in panel:
        defaults["max"] = panel["most"]
    if not bars:
        defaults["custom"] = _line(stacked=panel.get("stacked", False), steps=panel.get("steps", False))
    return {
        "type": "bargauge" if bars else "timeseries",
        "title": panel["title"],
        "description": panel["text"],
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": list(_dashed(panel))},
        "options": {"orientation": "horizontal", "displayMode": "basic", "reduceOptions": {"calcs": ["lastNotNull"]}}
        if bars
        else {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "editorMode": "code",
                "expr": query.replace("@", CHOSEN),
                "legendFormat": legend,
                "range": not bars,
                "instant": bars,
            }
            for place, (legend, query) in enumerate(panel["series"].items())
        ],
    }


def _line(*, stacked: bool, steps: bool) -> dict[str, Any]:
    return {
        "drawStyle": "line",
        "lineInterpolation": "stepAfter" if steps else "linear",
        "lineWidth": 1,
        "fillOpacity": 25 if stacked else 5,
        "showPoints": "never",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }


def _dashed(panel: Panel) -> Iterator[dict[str, Any]]:
    for word in DASHED:
        if any(legend.endswith(word) for legend in panel["series"]):
            yield {
                "matcher": {"id": "byRegexp", "options": f".*{word}"},
                "properties": [
                    {"id": "custom.stacking", "value": {"mode": "none"}},
                    {"id": "custom.fillOpacity", "value": 0},
                    {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}},
                ],
            }


def written() -> str:
    """The file, of the panels as they are now."""
    rows = yaml.safe_load((HERE / "panels.yaml").read_text(encoding="utf-8"))
    return json.dumps(dashboard(rows), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
