"""Loss over size, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.quality.measure import Result
from benchmarks.quality.unusable import Unusable

WIDE, HIGH, LINE, DPI = 8.0, 5.0, 0.14, 150
"""Inches, of which each line of the legend adds some; and dots an inch."""


def require() -> None:
    """Raise `Unusable` unless there is something to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise Unusable("--plot needs matplotlib; run: pip install 'kvtier[dev]'") from exc


def plot(results: Sequence[Result], named: Sequence[str], title: str, file: Path) -> None:
    """Draw every plan that loses anything; those with a name by it, others by a letter that the legend explains."""
    from matplotlib.figure import Figure

    others = sum(one.name not in named for one in results)
    figure = Figure(figsize=(WIDE, HIGH + LINE * others), layout="constrained")
    axes = figure.add_subplot()
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    for one in results:
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
