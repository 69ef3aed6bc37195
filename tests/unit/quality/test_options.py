"""The command: what it measures, and what it refuses before a model is loaded."""

from __future__ import annotations

import sys

import pytest

from benchmarks.quality.__main__ import _options, main
from benchmarks.quality.strategies import OWN, PLANS


def options(monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", ["quality", *given])
    return _options()


def names(chosen):
    return [one.name for one in chosen.strategies]


def test_ones_own_strategies_are_measured_beside_the_standard_ones(monkeypatch):
    plain = names(options(monkeypatch))
    assert names(options(monkeypatch, "--plan", "int2/token/sym/hadamard/lloyd", "--strategy", "h2o(keep=0.3)")) == [
        *plain,
        "int2/token/sym/hadamard/lloyd",
        "h2o(keep=0.3)",
    ]


def test_what_is_asked_for_twice_is_measured_once(monkeypatch):
    chosen = options(monkeypatch, "--only", "--plan", "int4", "--plan", "raw", "--plan", "int4")
    assert [(one.name, one.group) for one in chosen.strategies] == [("raw", PLANS), ("int4", OWN)]


def test_without_pruning_nothing_is_pruned(monkeypatch):
    chosen = options(monkeypatch, "--no-pruning", "--strategy", "h2o(keep=0.3)")
    assert chosen.strategies
    assert not any(one.pruning for one in chosen.strategies)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--strategy", "snapkv(keep=0.5)"), "did you mean snap_kv"),
        (("--plan", "int5"), "did you mean 'int8'"),
        (("--docs", "/nowhere/page.md"), "pass a page that exists"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(monkeypatch, capsys, given, says):
    monkeypatch.setattr("benchmarks.quality.model.load", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr(sys, "argv", ["quality", *given])
    assert main() == 1
    assert says in " ".join(capsys.readouterr().err.split())
