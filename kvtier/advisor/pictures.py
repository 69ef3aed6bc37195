"""Pictures of an answer about memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvtier.advisor.advice import Answer
from kvtier.advisor.footprint import Footprint
from kvtier.advisor.plot import picture
from kvtier.advisor.report import nbytes, short
from kvtier.advisor.strategies import Strategy
from kvtier.codecs.scheme import Scheme
from kvtier.spec import KVSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")

LENGTHS = tuple(1 << power for power in range(9, 18))
"""512 to 131,072 tokens."""
SHOWN = 5
"""Recommendations in the picture of memory."""
NAME = 32
"""Characters of a name that is written beside its mark; twice as many are in a legend."""
GROUPS = {"precision": "o", "pruning": "s", "both": "^"}
"""Marks."""


def draw(answer: Answer, path: Path) -> None:
    """Draw memory over context, loss over bits, and which layer is stored how, into one file.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    with picture(path, 11, 6.4) as figure:
        places = figure.subplot_mosaic("ab;cc", height_ratios=(3, 1.3))
        memory(answer, places["a"])
        loss(answer, places["b"])
        name, footprint = shown(answer)
        layers(name, footprint, answer.question.context, places["c"])


def shown(answer: Answer) -> tuple[str, Footprint]:
    """Whose layers are drawn: the first way that was asked for, else what is recommended, else native."""
    if len(answer.rows) > 1 or not answer.advice.ranked:
        row = answer.rows[:2][-1]
        return row.name, row.footprint
    strategy = answer.advice.ranked[0].candidate.strategy
    return strategy.name, _footprint(strategy, answer)


def _footprint(strategy: Strategy, answer: Answer) -> Footprint:
    return Footprint(answer.spec, strategy.storage(answer.spec.layers, answer.question.page_tokens))


def memory(answer: Answer, axes: Axes) -> None:
    """Bytes over the sequences' length: native, what was asked for, what is recommended."""
    question = answer.question
    for name, footprint, style in _ways(answer):
        axes.plot(
            LENGTHS, [question.batch * footprint.held(length) for length in LENGTHS], style, label=short(name, 2 * NAME)
        )
    if question.memory is not None:
        axes.axhline(question.memory, color="grey", linestyle="--", linewidth=1)
    axes.axvline(question.context, color="grey", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(LENGTHS[::2], [f"{length:,}" for length in LENGTHS[::2]])
    axes.yaxis.set_major_formatter(lambda value, _: nbytes(value))
    axes.minorticks_off()
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel(f"KV of {question.batch:,} sequence{'s' * (question.batch > 1)}")
    axes.set_title(f"{question.model}: memory", fontsize=10)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def _ways(answer: Answer) -> Iterator[tuple[str, Footprint, str]]:
    for row in answer.rows:
        yield row.name, row.footprint, "k-" if row.name == "native" else "-"
    for verdict in answer.advice.ranked[:SHOWN]:
        strategy = verdict.candidate.strategy
        if strategy.plan != "raw" or strategy.keep < 1:
            yield strategy.name, _footprint(strategy, answer), "--"


def loss(answer: Answer, axes: Axes) -> None:
    """What KL is judged by over bits an element of the whole KV, of all measured; named: what no other one beats."""
    strategies = [one for one in answer.measured.strategies if one.loss > 0]
    for group, mark in GROUPS.items():
        those = [one for one in strategies if _group(one.plan, one.policy) == group]
        axes.plot([16 * one.share for one in those], [one.loss for one in those], mark, markersize=4, label=group)
    best = float("inf")
    for one in sorted(strategies, key=lambda one: (one.share, one.loss)):
        if one.loss < best:
            best = one.loss
            at = (16 * one.share, one.loss)
            if len(one.name) <= NAME:
                axes.annotate(one.name, at, xytext=(4, 3), textcoords="offset points", fontsize=7).set_in_layout(False)
    if answer.advice.bound > 0:
        axes.axhline(answer.advice.bound, color="grey", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set_yscale("log")
    axes.set_xlabel("bits, for each element of the whole KV")
    axes.set_ylabel("KL, nats a token, upper end of 95 %")
    axes.set_title(f"loss of {answer.measured.model}", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _group(plan: str, policy: str | None) -> str:
    if policy is None:
        return "precision"
    return "pruning" if plan == "raw" else "both"


def layers(name: str, footprint: Footprint, context: int, axes: Axes) -> None:
    """Which layer is stored how, K and V apart, and how many tokens it keeps; the darker, the more."""
    from matplotlib import colormaps

    spec = footprint.spec
    parts = ("latent",) if spec.mla else ("K", "V")
    rows: list[tuple[str, str, Sequence[tuple[str, float]]]] = [
        (part, "Blues", [_stored(plan.schemes[number], spec) for plan in footprint.plans])
        for number, part in enumerate(parts)
    ]
    kept = [tokens / context for tokens in footprint.kept(context)]
    rows.append(("kept", "Greens", [(f"{share:.0%}", share) for share in kept]))
    for height, (_, colours, values) in enumerate(reversed(rows)):
        for first, stop, (value, strength) in _runs(values):
            colour = colormaps[colours](0.1 + 0.5 * strength)
            axes.barh(height, stop - first, left=first - 0.5, height=0.8, color=colour, edgecolor="white")
            axes.text((first + stop - 1) / 2, height, value, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [part for part, _, _ in reversed(rows)])
    axes.set_xlim(-0.5, spec.layers - 0.5)
    axes.set_xlabel("layer")
    axes.set_title(f"{name}: layers", fontsize=10)


def _stored(scheme: Scheme, spec: KVSpec) -> tuple[str, float]:
    return str(scheme), scheme.bits / (8 * spec.itemsize) if scheme.precision != "raw" else 1.0


def _runs(values: Sequence[T]) -> Iterator[tuple[int, int, T]]:
    """Where equal values follow each other: first, after the last, value."""
    at = 0
    for value, those in groupby(values):
        count = len(list(those))
        yield at, at + count, value
        at += count
