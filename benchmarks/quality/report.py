"""What was measured, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from benchmarks._harness import Figure
from benchmarks.quality.interval import Mean
from benchmarks.quality.measure import Result

METRICS = {"kl": ("nats/token", "lower"), "dnll": ("nats/token", "lower"), "top1": ("share of tokens", "higher")}


def figures(results: Sequence[Result], **about: object) -> Iterator[Figure]:
    """`quality.PLAN.METRIC` of each plan; `about` goes into every line."""
    for one in results:
        extra = {"plan": one.plan, "texts": len(one.losses), **about}
        yield Figure(f"quality.{one.name}.bits", round(one.bits, 4), "bits/value", "lower", extra)
        for metric, (unit, better) in METRICS.items():
            found = one.mean(metric)
            by_kind = {kind: _digits(one.mean(metric, kind).value) for kind in dict.fromkeys(one.kinds)}
            spread = _interval(found)
            yield Figure(
                f"quality.{one.name}.{metric}",
                _digits(found.value),
                unit,
                better,
                {**spread, "by_kind": by_kind, **extra},
            )


def table(results: Sequence[Result], title: str) -> Table:
    """One row a plan, by the bits that it takes."""
    caption = "Means over the texts with 95 % intervals (Student's t); KL and dNLL in nats a token"
    shown = Table(title=title, caption=caption, box=None)
    shown.add_column("plan", overflow="fold")
    for column in ("bits/value", "KL", "dNLL", "same top token"):
        shown.add_column(column, justify="right", no_wrap=True)
    for one in sorted(results, key=lambda one: -one.bits):
        kl, dnll, top1 = (one.mean(metric) for metric in METRICS)
        cells = _cell(kl, ".5f"), _cell(dnll, "+.4f"), _cell(top1, ".1%")
        shown.add_row(one.name, f"{one.bits:.2f}", *cells)
    return shown


def _cell(found: Mean, form: str) -> str:
    spread = f" ± {format(found.half, form.lstrip('+'))}" if found.half is not None else ""
    return format(found.value, form) + spread


def _interval(found: Mean) -> dict[str, Any]:
    if found.half is None:
        return {}
    return {"low": _digits(found.value - found.half), "high": _digits(found.value + found.half)}


def _digits(value: float) -> float:
    """Four of them: a loss of 0.00002 is not 0."""
    return float(f"{value:.4g}")
