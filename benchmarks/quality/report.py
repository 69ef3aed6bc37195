"""What was measured, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from benchmarks._harness import Figure
from benchmarks.quality.interval import Mean
from benchmarks.quality.measure import Result

METRICS = {"kl": ("nats/token", "lower"), "dnll": ("nats/token", "lower"), "top1": ("share of tokens", "higher")}
SIZES = {
    "keep": ("share of tokens", lambda one: one.keep),
    "bits": ("bits/value", lambda one: one.bits),
    "share": ("share of 16-bit bytes", lambda one: one.share),
}


def figures(results: Sequence[Result], **about: object) -> Iterator[Figure]:
    """`quality.STRATEGY.METRIC` of each; `about` goes into every line."""
    for one in results:
        extra = {"plan": one.plan, "policy": one.policy, "texts": len(one.losses), **about}
        for size, (unit, of) in SIZES.items():
            yield Figure(f"quality.{one.name}.{size}", round(of(one), 4), unit, "lower", extra)
        for metric, (unit, better) in METRICS.items():
            found = one.mean(metric)
            by_kind = {kind: digits(one.mean(metric, kind).value) for kind in dict.fromkeys(one.kinds)}
            spread = _interval(found)
            yield Figure(
                f"quality.{one.name}.{metric}",
                digits(found.value),
                unit,
                better,
                {**spread, "by_kind": by_kind, **extra},
            )


def table(results: Sequence[Result], title: str) -> Table:
    """One row a strategy, by the bytes that it holds."""
    caption = "Means over the texts with 95 % intervals (Student's t); KL and dNLL in nats a token"
    shown = Table(title=title, caption=caption, box=None)
    shown.add_column("strategy", overflow="fold")
    for column in ("tokens", "bits/value", "bytes", "KL", "dNLL", "same top token"):
        shown.add_column(column, justify="right", no_wrap=True)
    for one in sorted(results, key=lambda one: -one.share):
        shown.add_row(one.name, f"{one.keep:.0%}", f"{one.bits:.2f}", f"{one.share:.1%}", *losses(one))
    return shown


def losses(one: Result) -> list[str]:
    """KL, dNLL and agreement, each with its interval."""
    forms = {"kl": ".5f", "dnll": "+.4f", "top1": ".1%"}
    return [_cell(one.mean(metric), form) for metric, form in forms.items()]


def digits(value: float) -> float:
    """Four of them: a loss of 0.00002 is not 0."""
    return float(f"{value:.4g}")


def _cell(found: Mean, form: str) -> str:
    spread = f" ± {format(found.half, form.lstrip('+'))}" if found.half is not None else ""
    return format(found.value, form) + spread


def _interval(found: Mean) -> dict[str, Any]:
    if found.half is None:
        return {}
    return {"low": digits(found.value - found.half), "high": digits(found.value + found.half)}
