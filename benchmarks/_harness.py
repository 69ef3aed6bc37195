"""Measuring against a baseline on a machine that is never quiet, and printing what came out.

Times here are worth little alone: other work shares the cores and the memory bus. So a figure is a ratio to a baseline
that ran within the same second, and the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Column, Table


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        figure: its name, dotted.
        value: the number.
        unit: what it counts.
        better: "higher" or "lower".
        extra: whatever else the JSON line should carry.
    """

    figure: str
    value: float
    unit: str
    better: str = "higher"
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Ratio:
    """A candidate against its baseline.

    Attributes:
        ratio: baseline time / candidate time, median of the rounds: above 1 the candidate is faster.
        low: the lower quartile of that.
        high: the upper quartile.
        seconds: the candidate's median time.
        baseline_seconds: the baseline's median time.
        rounds: how often both ran.
    """

    ratio: float
    low: float
    high: float
    seconds: float
    baseline_seconds: float
    rounds: int

    def figure(self, name: str, unit: str, **extra: object) -> Figure:
        """The ratio as a figure, quartiles and times with it."""
        return Figure(
            name,
            round(self.ratio, 3),
            unit,
            "higher",
            {
                "low": round(self.low, 3),
                "high": round(self.high, 3),
                "seconds": round(self.seconds, 6),
                "baseline_seconds": round(self.baseline_seconds, 6),
                "rounds": self.rounds,
                **extra,
            },
        )

    def overhead(self, name: str, **extra: object) -> Figure:
        """By how much longer the candidate takes, as a share: 0.03 is 3 %."""
        low, high = sorted(1 / bound - 1 for bound in (self.low, self.high))
        return Figure(
            name,
            round(1 / self.ratio - 1, 4),
            "share",
            "lower",
            {
                "low": round(low, 4),
                "high": round(high, 4),
                "seconds": round(self.seconds, 6),
                "baseline_seconds": round(self.baseline_seconds, 6),
                "rounds": self.rounds,
                **extra,
            },
        )


def seconds(work: Callable[[], object]) -> float:
    """Run once; the wall time that it took."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def paired(
    baseline: Callable[[], object],
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 11,
    warmups: int = 2,
) -> dict[str, Ratio]:
    """Measure candidates against one baseline, interleaved.

    In each round every candidate runs between two runs of the baseline and is compared with their mean.
    """
    for _ in range(warmups):
        for work in (baseline, *candidates.values()):
            work()
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for _ in range(rounds):
        before = seconds(baseline)
        for name, work in candidates.items():
            took = seconds(work)
            after = seconds(baseline)
            pairs[name].append(((before + after) / 2, took))
            before = after
    return {name: ratio(measured) for name, measured in pairs.items()}


def ratio(pairs: list[tuple[float, float]]) -> Ratio:
    """Of (baseline seconds, candidate seconds), a pair a round."""
    ratios = [base / took for base, took in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Ratio(
        middle,
        low,
        high,
        statistics.median(took for _, took in pairs),
        statistics.median(base for base, _ in pairs),
        len(pairs),
    )


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser of `--json` and `--smoke`, which every benchmark takes."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="one JSON line a figure instead of a table")
    made.add_argument(
        "--smoke", action="store_true", help="small and quick: does it still run; the numbers mean little"
    )
    return made


def options(doc: str | None) -> argparse.Namespace:
    """Parse what every benchmark takes."""
    return parser(doc).parse_args()


def emit(figures: Iterable[Figure], *, as_json: bool) -> None:
    """Print figures: JSON lines as they come, or one table at the end."""
    table = Table(Column("figure", overflow="fold"), "value", "quartiles", "limit", "unit", "better")
    for one in figures:
        if as_json:
            line = {"figure": one.figure, "value": one.value, "unit": one.unit, "better": one.better, **one.extra}
            print(json.dumps(line), flush=True)
        else:
            spread = f"{one.extra['low']} - {one.extra['high']}" if "low" in one.extra else ""
            share = f"{one.extra['of_limit']:.0%} of " if "of_limit" in one.extra else ""
            limit = f"{share}{one.extra['limit']:g}" if "limit" in one.extra else ""
            table.add_row(one.figure, f"{one.value:g}", spread, limit, one.unit, one.better)
    if not as_json:
        Console().print(table)
