"""What was measured, as named figures: the same lines as the benchmarks print."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from kvtier_services.demo.engine import COARSE, TIERS

Measured = Mapping[str, Any]
Figure = dict[str, Any]


def figures(measured: Measured) -> list[Figure]:
    """One dictionary a figure, with `figure`, `value`, `unit`, `better` and what belongs to it."""
    b = measured["B"]
    asked = b["questions"]
    timed = asked[1:] or asked
    lines = [_speedup(tier, timed, measured) for tier in TIERS]
    first = asked[0]["without"]["seconds"]
    found = b["found"]
    lines += [
        _figure(
            "demo.speedup.found",
            round(first / found["seconds"], 2),
            "x",
            note="question 1, blocks where engine A left them, process cold",
            **{name: found[name] for name in ("seconds", "loaded", "computed", "tiers")},
        ),
        _figure("demo.tokens_equal.raw", int(tokens_equal(measured)), "bool", questions=len(asked)),
        *(_agreement(plan, asked) for plan in COARSE),
    ]
    raw = b["stored"]["raw"]
    lines += [
        _figure(f"demo.stored.{plan}", round(nbytes, 1), "bytes/token", "lower", against_raw=round(nbytes / raw, 4))
        for plan, nbytes in b["stored"].items()
    ]
    served = served_by_tier(measured)
    lines += [_figure(f"demo.served.{tier}", served.get(tier, 0), "tokens") for tier in TIERS]
    return [*lines, _figure("demo.seconds", round(measured["seconds"], 1), "s", "lower")]


def tokens_equal(measured: Measured) -> bool:
    """Whether every answer with plan raw has the tokens of the answer without cache, in both engines."""
    a, b = measured["A"], measured["B"]
    expected = b["questions"][0]["expected"]
    return (
        all(question["equal"] for question in b["questions"])
        and a["answer"] == b["found"]["answer"] == expected
        and a["second"] == b["second"]["answer"]
    )


def served_by_tier(measured: Measured) -> dict[str, int]:
    """Tokens of hits by tier, as the host counts them."""
    served: dict[str, int] = measured["B"]["status"].get("tokens", {})
    return served


def median_seconds(timed: list[Any], tier: str | None = None) -> float:
    """Median time to first token: from a tier, or without cache."""
    times = [one["with"][tier] if tier else one["without"] for one in timed]
    return float(median(one["seconds"] for one in times))


def _speedup(tier: str, timed: list[Any], measured: Measured) -> Figure:
    ratios = [one["without"]["seconds"] / one["with"][tier]["seconds"] for one in timed]
    last = timed[-1]["with"][tier]
    whole = all(set(one["with"][tier]["tiers"]) == {tier} for one in timed)
    return _figure(
        f"demo.speedup.{tier}",
        round(median(ratios), 2),
        "x",
        low=round(min(ratios), 2),
        high=round(max(ratios), 2),
        seconds=round(median_seconds(timed, tier), 4),
        seconds_without=round(median_seconds(timed), 4),
        loaded=last["loaded"],
        computed=last["computed"],
        all_from_this_tier=whole,
        label=measured["labels"].get(tier, tier),
        threads=measured["B"]["threads"],
    )


def _agreement(plan: str, asked: list[Any]) -> Figure:
    coarse = [one[plan] for one in asked]
    positions = sum(one["positions"] for one in coarse)
    return _figure(
        f"demo.agreement.{plan}",
        round(sum(one["agreed"] for one in coarse) / positions, 4),
        "share",
        positions=positions,
        logit_difference_max=round(max(one["largest"] for one in coarse), 4),
        logit_difference_mean=round(sum(one["mean"] for one in coarse) / len(coarse), 5),
        logit_spread=round(sum(one["spread"] for one in coarse) / len(coarse), 3),
    )


def _figure(name: str, value: float, unit: str, better: str = "higher", **more: Any) -> Figure:
    return {"figure": name, "value": value, "unit": unit, "better": better, **more}
