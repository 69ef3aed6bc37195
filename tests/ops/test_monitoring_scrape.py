"""What rules, alerts, panels and runbooks name is in a scrape of a real host, by name and with these labels."""

from __future__ import annotations

import re
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.ops.monitoring import (
    ALERTS,
    ENDS,
    MONITORING,
    OF_PROMETHEUS,
    RUNBOOKS,
    dashboard,
    exported,
    needs_promtool,
    panels,
    promtool,
    rules,
)
from tests.redis_fixture import server_in_temporary_folder
from tests.truth.host import truth_host

SERIES = re.compile(r"(?<![\w:])(?:kvtier|process)_[a-z_]+\b")
NO_SERIES = {"kvtier_services"}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory) -> str:
    """Of a host with all tiers, two devices, an index in Redis, peers, routers and remote clients."""
    with (
        server_in_temporary_folder() as (server, _),
        truth_host(tmp_path_factory.mktemp("host"), server) as host,
        urllib.request.urlopen(host.url, timeout=10) as answer,
    ):
        return answer.read().decode()


@pytest.fixture(scope="module")
def there(scraped) -> dict[str, set[str]]:
    """Labels of each series, by its name; none where nothing has happened yet that would have labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(scraped):
        for end in ENDS.get(family.type, ("",)):
            found[family.name + end] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def named() -> set[str]:
    """Series that are named anywhere, but those that the rules make."""
    texts = [rule["expr"] for rule in (*rules("rules"), *ALERTS)]
    texts += [target["expr"] for panel in panels(dashboard()) for target in panel["targets"]]
    return {name for text in (*texts, RUNBOOKS.read_text()) for name in SERIES.findall(text)} - NO_SERIES


def test_what_is_named_is_scraped(there):
    assert len(named()) > 60
    assert named() - set(there) == set()


def test_labels_are_those_of_the_table(there):
    """Against which all expressions are checked elsewhere."""
    table = exported()
    for name in named():
        assert there[name] <= table[name] - OF_PROMETHEUS, name
        assert there[name] in (set(), {*table[name]} - OF_PROMETHEUS), name
    assert sum(bool(there[name]) for name in named()) > 55


@needs_promtool
def test_prometheus_finds_nothing_to_say_of_the_metrics(scraped):
    done = promtool("check", "metrics", given=scraped)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    done = promtool("check", "metrics", given=scraped.replace("kvtier_leases", "kvtierLeases"))
    assert done.returncode != 0


def test_no_other_name_is_in_the_files():
    """Such as one within a text, which no expression shows."""
    text = "".join(path.read_text() for path in (*MONITORING.glob("*.yaml"), RUNBOOKS))
    names = set(SERIES.findall(text)) - NO_SERIES
    assert {name for name in names if name not in exported()} == set()
