"""What is best for how few bytes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.quality.measure import Result

WAYS = ("a plan alone", "pruning alone", "both")
EQUAL = 1.01
"""Sizes that differ by less than this are the same."""


def way(one: Result) -> str:
    """Which of `WAYS` a strategy goes."""
    if not one.strategy.pruning:
        return WAYS[0]
    return WAYS[1] if one.strategy.plan == "raw" else WAYS[2]


def best(results: Sequence[Result], times: float) -> dict[str, Result | None]:
    """By each way, what loses least of those that hold at most 1/times of the bytes."""
    small = [one for one in results if one.share <= 1 / times]
    return {its: min((one for one in small if way(one) == its), key=_loss, default=None) for its in WAYS}


def crossing(results: Sequence[Result]) -> float | None:
    """From how many times smaller on every plan alone loses more than pruning with one; None: nowhere.

    Taken from what was measured, without a curve through it: the smallest size of a plan alone that no pruned cache
    of that size or less beats.
    """
    ahead = [
        one.share
        for one in results
        if way(one) == WAYS[0]
        and not any(
            other.share <= EQUAL * one.share and _loss(other) < _loss(one) for other in results if way(other) != WAYS[0]
        )
    ]
    return 1 / min(ahead) if ahead else None


def _loss(one: Result) -> float:
    return one.mean("kl").value
