"""What an expression of Prometheus reads, and which labels its result has: checked against what there is to read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import promql_parser as promql

Known = Mapping[str, frozenset[str]]
"""Labels of each series that there is, by its name."""
SETS = ("and", "unless", "or")
COMPARED = ("==", "!=", ">", "<", ">=", "<=")
SAME = {
    *("rate", "increase", "changes", "clamp_min", "last_over_time", "avg_over_time", "max_over_time", "min_over_time"),
}
"""Functions that keep the labels of what they are given."""


class Wrong(Exception):
    """What is wrong with an expression."""


def parse(expr: str) -> Any:
    """Parse it; variables of Grafana that stand for a time are any time."""
    try:
        return promql.parse(re.sub(r"\$__(rate_)?interval\b", "5m", expr))
    except ValueError as exc:
        raise Wrong(f"{expr}: {exc}") from exc


def labels(expr: str, known: Known) -> frozenset[str]:
    """Labels that its result may have.

    Raises:
        Wrong: it cannot be parsed, or names a series or a label that there is not.
    """
    return _labels(parse(expr), known)


def _labels(node: Any, known: Known) -> frozenset[str]:
    if isinstance(node, promql.VectorSelector):
        if node.name not in known:
            raise Wrong(f"there is no {node.name}")
        return _have(known[node.name], (matcher.name for matcher in node.matchers.matchers), node)
    if isinstance(node, promql.MatrixSelector):
        return _labels(node.vector_selector, known)
    if isinstance(node, promql.ParenExpr | promql.UnaryExpr):
        return _labels(node.expr, known)
    if isinstance(node, promql.AggregateExpr):
        return _aggregated(node, _labels(node.expr, known))
    if isinstance(node, promql.BinaryExpr):
        return _joined(node, known)
    if isinstance(node, promql.Call):
        return _called(node, known)
    if isinstance(node, promql.NumberLiteral):
        return frozenset()
    raise Wrong(f"{node}: a {type(node).__name__}, of which the tests know nothing")


def _aggregated(node: Any, inner: frozenset[str]) -> frozenset[str]:
    if node.modifier is None:
        return frozenset()
    named = _have(inner, node.modifier.labels, node) & {*node.modifier.labels}
    return named if node.modifier.type == promql.AggModifierType.By else inner - named


def _called(node: Any, known: Known) -> frozenset[str]:
    name = node.func.name
    if name == "time":
        return frozenset()
    if name == "histogram_quantile":
        return _have(_labels(node.args[1], known), ("le",), node) - {"le"}
    if name == "label_replace":
        inner = _labels(node.args[0], known)
        return _have(inner, (node.args[3].val,), node) | {node.args[1].val}
    if name not in SAME:
        raise Wrong(f"{name}: a function of which the tests know nothing")
    return _labels(node.args[0], known)


def _joined(node: Any, known: Known) -> frozenset[str]:
    left, right = _labels(node.lhs, known), _labels(node.rhs, known)
    modifier, op = node.modifier, str(node.op)
    on = ()
    if modifier is not None and modifier.matching is not None:
        on = modifier.matching.labels
        _have(left, on, node)
        if modifier.matching.type == promql.LabelModifierType.Include:
            _have(right, on, node)
    elif left != right and left and right:
        raise Wrong(f"{node}: {sorted(left)} on the left, {sorted(right)} on the right, and no `on`")
    if op == "or":
        return left & right
    many = modifier is not None and modifier.card == promql.VectorMatchCardinality.ManyToOne
    if not on or many or op in SETS or op in COMPARED or not right:
        return left or right
    return left & {*on} if modifier.matching.type == promql.LabelModifierType.Include else left - {*on}


def _have(there: frozenset[str], named: Any, node: Any) -> frozenset[str]:
    lacking = {*named} - there
    if lacking:
        raise Wrong(f"{node}: there is no label {', '.join(sorted(lacking))}, only {', '.join(sorted(there))}")
    return there
