"""A picture of what a replay found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.advisor.replay import Setup
from kvtier.advisor.report import TIERS, nbytes
from kvtier.advisor.sweep import Sweep
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure to draw on, of so many inches, that is a file afterwards.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError("a picture needs matplotlib: pip install 'kvtier[plot]'") from exc
    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be written: {exc}") from exc


def plot(setup: Setup, found: Sweep, ceiling: float, path: Path) -> None:
    """Draw the hit ratio over memory and by plan.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    with picture(path, 8, 3.6) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        memory = [factor * sum(getattr(setup, name) for name in TIERS) for factor in found.sizes]
        left.plot(memory, [outcome.hit_ratio for outcome in found.sizes.values()], "o-")
        left.set_xscale("log", base=2)
        left.set_xticks(memory, [nbytes(each) for each in memory])
        left.minorticks_off()
        left.set_xlabel(f"memory of all tiers, plan {setup.plan}")
        left.set_ylabel("hit ratio")
        names = list(found.plans)
        bottom = [0.0] * len(names)
        for tier in TIERS:
            heights = [outcome.hits.get(tier, 0) / max(outcome.asked, 1) for outcome in found.plans.values()]
            if any(heights):
                right.bar(names, heights, bottom=bottom, label=tier)
                bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        right.set_xlabel(" + ".join(f"{name} {nbytes(getattr(setup, name))}" for name in TIERS if getattr(setup, name)))
        right.legend(loc="lower right")
        for axes in (left, right):
            axes.axhline(ceiling, color="grey", linestyle="--", linewidth=1)
            axes.set_ylim(0, 1.05 * ceiling or 1)
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
        figure.suptitle(f"{setup.model}: {found.asked.requests:,} requests", fontsize=10)
