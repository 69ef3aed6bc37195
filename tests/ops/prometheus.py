"""A real Prometheus over a real host, with the rules and alerts of k8s/monitoring; nobody waits for minutes."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import yaml

from tests.cluster.foreign import free_ports
from tests.cluster.kit import within
from tests.examples_fixture import blocks
from tests.ops.monitoring import groups, plain

SECONDS = "2s"
"""In the place of the minutes for which an alert waits."""
ALIKE = ("__name__", "job", "host")
"""Labels that are the same on all series of one host."""


class Prometheus:
    """What it says over HTTP."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        """Of its API.

        Raises:
            AssertionError: it does not take the query; with its reason.
        """
        try:
            with urllib.request.urlopen(
                f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10
            ) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as exc:
            raise AssertionError(f"{query}: {exc.read().decode()}") from exc

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def query(self, expr: str) -> dict[frozenset[tuple[str, str]], float]:
        """Values of now, by the other labels."""
        found = self.get("query", query=expr)["result"]
        return {
            frozenset((name, value) for name, value in one["metric"].items() if name not in ALIKE): float(
                one["value"][1]
            )
            for one in found
        }

    def value(self, expr: str, **labels: str) -> float | None:
        return self.query(expr).get(frozenset(labels.items()))

    def firing(self) -> set[str]:
        """Names of alerts that fire."""
        return {one["labels"]["alertname"] for one in self.get("alerts")["alerts"] if one["state"] == "firing"}

    def rules(self) -> dict[str, str]:
        """Faults of rules, by name; empty for those that work."""
        found = self.get("rules")["groups"]
        return {rule["name"]: rule.get("lastError", "") for group in found for rule in group["rules"]}


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Started as the page of the runbooks says, but that it looks each second."""
    for name in ("rules", "alerts"):
        found = groups(name)
        for group in found:
            group["rules"] = [rule | ({"for": SECONDS} if "for" in rule else {}) for rule in group["rules"]]
        plain(folder, name, found)
    [block] = blocks("yaml", page="docs/runbooks.md")
    config = yaml.safe_load(block.text)
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = ["rules.yaml", "alerts.yaml"]
    [scrape] = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": [urlparse(target).netloc]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    [port] = free_ports(1)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        made = Prometheus(port)
        within(30.0, lambda: made.ready() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield made
    finally:
        process.terminate()
        process.wait(20.0)
