"""Rules and alerts: Prometheus takes them, each alert fires when it must and only then, each has a runbook."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.examples_fixture import blocks
from tests.ops.monitoring import (
    ALERTS,
    CASES,
    FILES,
    ROOT,
    RUNBOOKS,
    everything,
    exported,
    groups,
    needs_promtool,
    plain,
    promtool,
    recorded,
    rules,
    used,
)
from tests.ops.promql import Wrong, labels

NAMES = [alert["alert"] for alert in ALERTS]
CASE_FILES = sorted(path.stem for path in CASES.glob("*.yaml"))
OF_FILE = {
    name: {test["alertname"] for case in yaml.safe_load((CASES / f"{name}.yaml").read_text())["tests"]
           for test in case["alert_rule_test"]}
    for name in CASE_FILES
}  # fmt: skip
PAGES = {"KvtierFleetGone", "KvtierHitRatioCollapsed"}


@pytest.fixture
def folder(tmp_path) -> Path:
    """The rules as Prometheus reads them, and the cases."""
    for name in FILES:
        plain(tmp_path, name)
    for name in CASE_FILES:
        shutil.copy(CASES / f"{name}.yaml", tmp_path / f"test_{name}.yaml")
    return tmp_path


@needs_promtool
@pytest.mark.parametrize("name", FILES)
def test_prometheus_takes_them(folder, name):
    done = promtool("check", "rules", folder / f"{name}.yaml")
    assert done.returncode == 0, done.stderr
    assert f"{len(rules(name))} rules found" in done.stdout


@needs_promtool
@pytest.mark.parametrize("name", CASE_FILES)
def test_alerts_fire_when_they_must_and_only_then(folder, name):
    done = promtool("test", "rules", folder / f"test_{name}.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_seen_to_fire_to_hold_back_and_to_end():
    seen = {name: [] for name in NAMES}
    for file in CASE_FILES:
        for case in yaml.safe_load((CASES / f"{file}.yaml").read_text())["tests"]:
            for test in case["alert_rule_test"]:
                seen[test["alertname"]].append((case["name"], bool(test["exp_alerts"])))
    for name, tests in seen.items():
        cases = {case for case, fires in tests if fires}
        assert cases, f"{name} is never seen to fire"
        order = [fires for case, fires in tests if case in cases]
        assert order[0] is False, f"{name}: nothing says when it does not fire yet"
        assert order[-1] is False or name == "KvtierFleetGone", f"{name}: nothing says when it ends"


CHANGES = {
    "never": lambda alert: alert | {"expr": f"({alert['expr']}) and on () vector(1) > 2"},
    "at once": lambda alert: {name: value for name, value in alert.items() if name != "for"},
    "late": lambda alert: alert | {"for": "9h"},
    "severity": lambda alert: alert | {"labels": {"severity": "none"}},
    "said": lambda alert: alert | {"annotations": alert["annotations"] | {"summary": "?"}},
}


@needs_promtool
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("file", CASE_FILES)
def test_a_changed_alert_fails_its_cases(folder, file, change):
    """Each alone: else one of them would do for all."""
    wrong = groups("alerts")
    names = {
        alert["alert"]
        for alert in ALERTS
        if alert["alert"] in OF_FILE[file] and (change != "at once" or "for" in alert)
    }
    for group in wrong:
        group["rules"] = [CHANGES[change](rule) if rule["alert"] in names else rule for rule in group["rules"]]
    plain(folder, "alerts", wrong)
    done = promtool("test", "rules", folder / f"test_{file}.yaml")
    assert done.returncode != 0
    assert set(re.findall(r"alertname: ?(\w+)", done.stdout + done.stderr)) == names


GUARDS = {
    "another fleet": ("hosts", "alerts", "unless on (job) kvtier_build_info"),
    "back elsewhere": ("hosts", "alerts", "unless on (job, host) kvtier_draining"),
    "what repeats no more": ("hits", "alerts", "and on (job, host) kvtier:ceiling_gap:ratio > 0.2"),
    "little to do": (
        "hits",
        "rules",
        "and on (job, host) sum by (job, host) (rate(kvtier_asked_blocks_total[15m])) > 1",
    ),
    "just begun": (
        "hits",
        "rules",
        "and on (job, host) time() - max by (job, host) (kvtier_start_time_seconds) > 7200",
    ),
    "has an alert of its own": (
        "fleet",
        "alerts",
        "unless on (job, host) avg_over_time(kvtier_index_breaker_open[5m]) > 0.5",
    ),
    "is gone": (
        "fleet",
        "alerts",
        'and on (job, peer) label_replace(count by (job, host) (kvtier_build_info), "peer", "$1", "host", "(.+)")',
    ),
    "lost": ("fleet", "alerts", "or sum by (job, host) (increase(kvtier_events_lost_total[15m])) > 0"),
}
"""What keeps alerts from firing for nothing, and where the cases of it are."""


@needs_promtool
@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_is_needed(folder, guard):
    cases, file, text = GUARDS[guard]
    weaker, found = groups(file), 0
    for group in weaker:
        for rule in group["rules"]:
            found += text in rule["expr"]
            rule["expr"] = rule["expr"].replace(text, "")
    assert found
    plain(folder, file, weaker)
    done = promtool("test", "rules", folder / f"test_{cases}.yaml")
    assert done.returncode != 0
    assert "exp:" in done.stdout + done.stderr, "other alerts than expected, and no fault of the expression"


BROKEN = {
    "expression": ("ratio_rate15m > 0.1", "ratio_rate15m > > 0.1"),
    "a for that is no time": ("for: 15m", "for: soon"),
    "unknown field": ("    - alert: KvtierNvmeOff", "    - alert: KvtierNvmeOff\n      sumary: x"),
    "template": ("An engine on {{ $labels.host }}", "An engine on {{ $labels.host }"),
}


@needs_promtool
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused(tmp_path, what):
    text = (ROOT / "k8s" / "monitoring" / "alerts.yaml").read_text()
    before, after = BROKEN[what]
    assert before in text
    made = yaml.safe_load(text.replace(before, after, 1))["spec"]["groups"]
    assert promtool("check", "rules", plain(tmp_path, "alerts", made)).returncode != 0


def test_rules_and_alerts_name_what_there_is():
    known = everything()
    for alert in ALERTS:
        there = labels(alert["expr"], known)
        assert set().union(*map(used, alert["annotations"].values())) <= there, alert["alert"]
        assert "job" in there, alert["alert"]


@pytest.mark.parametrize(
    ("expr", "why"),
    [
        ("sum by (job) (rate(kvtier_asked_block_total[5m]))", "there is no kvtier_asked_block_total"),
        ("sum by (host, tiers) (kvtier_tier_used_bytes)", "there is no label tiers"),
        ('kvtier_miss_blocks_total{tier="cpu"}', "there is no label tier"),
        ("kvtier_tier_up / kvtier_leases", "and no `on`"),
        ("histogram_quantile(0.5, rate(kvtier_match_seconds_sum[5m]))", "there is no label le"),
        ("sum by (job (kvtier_leases)", "unclosed left parenthesis"),
    ],
)
def test_an_expression_that_names_what_there_is_not_is_found(expr, why):
    with pytest.raises(Wrong, match=re.escape(why)):
        recorded(exported(), [{"record": "kvtier:x:sum", "expr": expr}])


def test_recorded_names_are_used_and_their_own():
    """`level:metric:operation`; the exporter's own have no colon."""
    known = everything()
    names = [rule["record"] for rule in rules("rules")]
    assert all(re.fullmatch(r"kvtier:[a-z_]+:[a-z0-9_]+", name) for name in names)
    assert not any(":" in name for name in exported())
    files = (
        "k8s/monitoring/rules.yaml",
        "k8s/monitoring/alerts.yaml",
        "k8s/monitoring/panels.yaml",
        "docs/runbooks.md",
    )
    text = "".join((ROOT / file).read_text() for file in files)
    assert [name for name in names if text.count(name) < 2] == []
    assert set(names) <= set(known)


def test_alerts_are_for_people():
    assert len(NAMES) == len(set(NAMES))
    for alert in ALERTS:
        assert alert["alert"].startswith("Kvtier")
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        assert alert["annotations"]["runbook_url"] == f"docs/runbooks.md#{alert['alert'].lower()}"
        assert alert["annotations"]["summary"].endswith(".")
        assert alert["labels"] == {"severity": "page" if alert["alert"] in PAGES else "ticket"}
        assert alert["labels"]["severity"] == "ticket" or "for" in alert, "nobody is woken by a moment"


def sections() -> dict[str, str]:
    """Of the runbooks that are of an alert, by name."""
    found = re.split(r"^## (\w+)$", RUNBOOKS.read_text(), flags=re.MULTILINE)
    return {name: text for name, text in zip(found[1::2], found[2::2], strict=True) if name.startswith("Kvtier")}


def test_each_alert_has_a_runbook_and_each_runbook_an_alert():
    found = sections()
    assert list(found) == NAMES, "in the order of the alerts"
    for alert in ALERTS:
        text = found[alert["alert"]]
        assert all(f"* **{word}**" in text for word in ("Users notice", "Look", "Do", "Ends")), alert["alert"]
        assert ("*Page.*" in text) == (alert["labels"]["severity"] == "page"), alert["alert"]
        known = set(re.findall(r"\]\(#(\w+)\)", text))
        assert known <= {name.lower() for name in NAMES}


def test_queries_of_runbooks_name_what_there_is():
    known = everything()
    queries = [line for block in blocks("text", page="docs/runbooks.md") for line in block.text.splitlines()]
    for query in queries:
        labels(query, known)
    assert len(queries) > 10


@needs_promtool
def test_the_way_without_an_operator_works(tmp_path):
    """Commands and prometheus.yml of the page, with a folder of this test in the place of Prometheus'."""
    here = str(tmp_path)
    for block in blocks("sh", page="docs/runbooks.md"):
        for line in block.text.splitlines():
            command = line.replace("/etc/prometheus", shlex.quote(here))
            done = subprocess.run(
                ["sh", "-ec", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr
    for name in FILES:
        made = yaml.safe_load((tmp_path / f"kvtier-{name}.yaml").read_text())["groups"]
        text = yaml.safe_dump(groups(name)).replace("docs/runbooks.md", "https://docs.example.org/runbooks.html")
        assert made == yaml.safe_load(text)
    [block] = blocks("yaml", page="docs/runbooks.md")
    config = tmp_path / "prometheus.yml"
    config.write_text(block.text.replace("/etc/prometheus", here))
    done = promtool("check", "config", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rules found") == 2
    config.write_text(block.text.replace("/etc/prometheus", here).replace("job_name", "jobname"))
    assert promtool("check", "config", config).returncode != 0
