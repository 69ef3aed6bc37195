"""Loss over size, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.measure import Result
from benchmarks.quality.strategies import COMBINATIONS, OWN, PLANS, PRUNED
from benchmarks.quality.unusable import Unusable

WIDE, HIGH, LINE, DPI = 8.0, 5.0, 0.14, 150
"""Inches, of which each line of the legend adds some; and dots an inch."""


def require() -> None:
    """Raise `Unusable` unless there is something to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise Unusable("pictures need matplotlib; run: pip install 'kvtier[plot]'") from exc


def plot(results: Sequence[Result], named: Sequence[str], title: str, file: Path) -> None:
    """Draw KL over bits of every plan that loses anything: the named, and others by a letter that is explained."""
    from matplotlib.figure import Figure

    whole = [one for one in results if not one.strategy.pruning]
    others = sum(one.name not in named for one in whole)
    figure = Figure(figsize=(WIDE, HIGH + LINE * others), layout="constrained")
    axes = figure.add_subplot()
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    for one in whole:
        kl = one.mean("kl")
        if kl.value <= 0:
            continue
        known = one.name in named
        label = one.name if known else next(letters, "*")
        below = min(kl.half or 0.0, kl.value * 0.99)
        axes.errorbar(
            one.bits,
            kl.value,
            yerr=[[below], [kl.half or 0.0]],
            fmt="o" if known else "s",
            color="C0" if known else "0.6",
            markersize=7 if known else 4,
            capsize=3,
            label=None if known else f"{label}  {one.plan}",
            zorder=3 if known else 2,
        )
        beside, weight = ((7, 4), "bold") if known else ((-12, -4), "normal")
        axes.annotate(label, (one.bits, kl.value), beside, textcoords="offset points", weight=weight)
    axes.set(title=title, xlabel="bits a value, all overhead included", ylabel="KL(exact || stored), nats a token")
    axes.set_yscale("log")
    axes.margins(x=0.12)
    axes.grid(visible=True, which="major", alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower left", fontsize=6.5, frameon=False, handlelength=0)
    figure.savefig(file, dpi=DPI)


def plot_held(results: Sequence[Result], title: str, file: Path) -> None:
    """Draw KL over the bytes that are held: plans, presets over their budgets, and both together."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    lossy = [one for one in results if one.mean("kl").value > 0]
    figure = Figure(figsize=(WIDE, HIGH + 1), layout="constrained")
    axes = figure.add_subplot()
    _dots(axes, [one for one in lossy if not one.strategy.pruning])
    colors = {}
    for color, (preset, curve) in enumerate(_curves(lossy, PRUNED).items(), 1):
        colors[preset] = f"C{color}"
        axes.plot(*_points(curve), marker=".", linewidth=1, color=colors[preset], label=preset)
    for both, curve in _curves(lossy, COMBINATIONS).items():
        shares, kls = _points(curve)
        color = colors.get(both.rpartition("*")[2], "0.2")
        axes.plot(shares, kls, marker="x", linestyle="--", linewidth=1, color=color)
        axes.annotate(both, (shares[0], kls[0]), (3, -9), textcoords="offset points", size=7, color=color)
    axes.set(title=title, xlabel="bytes held, of the whole KV in 16 bits", ylabel="KL(exact || held), nats a token")
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1]
    axes.set_xticks(ticks, minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    figure.savefig(file, dpi=DPI)


def _dots(axes: Any, plans: Sequence[Result]) -> None:
    """Those with names in the foreground."""
    labels = {PLANS: "a plan", OWN: "another recipe"}
    for one in plans:
        at, named = (one.share, one.mean("kl").value), one.strategy.group == PLANS
        style = {"marker": "o", "color": "C0", "markersize": 7} if named else {"marker": "s", "color": "0.6"}
        axes.plot(*at, **{"markersize": 4, "linestyle": "", "label": labels.pop(one.strategy.group, None)} | style)
        if named:
            axes.annotate(one.name, at, (7, -3), textcoords="offset points", weight="bold", size=8)


def _curves(results: Sequence[Result], group: str) -> dict[str, list[Result]]:
    """Results of a group, the largest first, by what they are budgets of."""
    curves: dict[str, list[Result]] = {}
    for one in sorted(results, key=lambda one: -one.share):
        if one.strategy.group == group:
            curves.setdefault(one.name.partition("(")[0], []).append(one)
    return curves


def _points(curve: Sequence[Result]) -> tuple[list[float], list[float]]:
    return [one.share for one in curve], [one.mean("kl").value for one in curve]
