"""Tables of a page of the docs, written between markers.

<!-- measured: plans -->
...
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.quality.frontier import WAYS, best, crossing
from benchmarks.quality.measure import Result
from benchmarks.quality.report import losses
from benchmarks.quality.speed import Speed
from benchmarks.quality.strategies import BUDGETS, COMBINATIONS, CONTROLS, OWN, PLANS, PRUNED
from benchmarks.quality.unusable import Unusable

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SECTION = re.compile(r"(<!-- measured: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_HEAD = "KL, nats a token", "dNLL, nats a token", "same top token"
Tables = dict[str, Callable[[], str]]


def rewrite(file: Path, results: Sequence[Result], speeds: Sequence[Speed]) -> None:
    """Put what was measured in place of what stands between a page's markers.

    Raises:
        Unusable: the page has no markers, or asks for a table that there is not.
    """
    text = check(file)
    made = tables(results, speeds)
    file.write_text(_SECTION.sub(lambda found: found[1] + made[found[2]]() + found[4], text), encoding="utf-8")


def check(file: Path) -> str:
    """The page's text, if it can be rewritten."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as exc:
        raise Unusable(f"--docs {file}: {exc.strerror}; pass a page that exists") from exc
    asked = [found[2] for found in _SECTION.finditer(text)]
    unknown = [name for name in asked if name not in tables([], [])]
    if not asked or unknown:
        known = ", ".join(tables([], []))
        raise Unusable(f"--docs {file}: put the markers <!-- measured: NAME --> and <!-- end --> there; NAME: {known}")
    return text


def tables(results: Sequence[Result], speeds: Sequence[Speed]) -> Tables:
    """What a page may ask for, by name."""
    groups = {name: [one for one in results if one.strategy.group == name] for name in GROUPS}
    return {
        PLANS: lambda: _plans(groups[PLANS]),
        "kinds": lambda: _kinds([one for one in results if one.name in KINDS]),
        OWN: lambda: _recipes(groups[OWN]),
        "budgets": lambda: _budgets(groups[PRUNED]),
        PRUNED: lambda: _held(groups[PRUNED]),
        CONTROLS: lambda: _held(groups[CONTROLS]),
        COMBINATIONS: lambda: _held(groups[COMBINATIONS]),
        "frontier": lambda: _frontier([one for one in results if one.strategy.group != CONTROLS]),
        "speed": lambda: _speeds(speeds),
    }


TIMES = (1.5, 2, 3, 4, 5, 6, 8, 12, 16)
GROUPS = (PLANS, OWN, PRUNED, CONTROLS, COMBINATIONS)
KINDS = ("int8", "k8v4", "int4", "int3", "snap_kv(keep=0.5)", "h2o(keep=0.5)", "streaming_llm(sinks=4, recent=508)")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"


def _plans(results: Sequence[Result]) -> str:
    by_size = sorted(results, key=lambda one: -one.bits)
    rows = [[f"`{one.name}`", f"{one.bits:.2f}", *losses(one)] for one in by_size]
    return _table(["plan", "bits a value", *_HEAD], rows)


def _recipes(results: Sequence[Result]) -> str:
    rows = [
        [letter, f"`{one.name}`", f"{one.bits:.2f}", *losses(one)]
        for letter, one in zip(LETTERS, results, strict=False)
    ]
    return _table(["", "plan", "bits a value", *_HEAD], rows)


def _held(results: Sequence[Result]) -> str:
    """By the bytes, the fewest last."""
    rows = [
        [f"`{one.name}`", _percent(one.keep), f"{one.share:.1%}", *losses(one)]
        for one in sorted(results, key=lambda one: -one.share)
    ]
    return _table(["", "tokens kept", "bytes", *_HEAD], rows)


def _budgets(results: Sequence[Result]) -> str:
    """KL of each preset by its budget."""
    rows: dict[str, dict[float, str]] = {}
    for one in results:
        near = min(BUDGETS, key=lambda keep: abs(keep - one.keep))
        if abs(near - one.keep) < 0.01:
            rows.setdefault(one.name.partition("(")[0], {})[near] = f"{one.mean('kl').value:.4f}"
    ordered = sorted(rows.items(), key=lambda row: row[1].get(BUDGETS[1], ""))
    head = ["KL, nats a token", *(_percent(keep) for keep in BUDGETS)]
    return _table(head, [[f"`{name}`", *(row.get(keep, "") for keep in BUDGETS)] for name, row in ordered])


def _frontier(results: Sequence[Result]) -> str:
    """What is best for how few bytes, and from where on pruning is part of it; other recipes by their letters."""
    recipes = (one.name for one in results if one.strategy.group == OWN)
    letters = dict(zip(recipes, LETTERS, strict=False))

    def cell(one: Result | None) -> str:
        if one is None:
            return ""
        return f"{one.mean('kl').value:.5f} {letters.get(one.name) or f'`{one.name}`'}"

    rows = [[f"{times:g}", *(cell(one) for one in best(results, times).values())] for times in TIMES]
    until = crossing(results)
    said = "" if until is None else f"\nPlans alone are ahead until {until:.1f} times smaller.\n"
    return _table(["times smaller", *(f"KL: {its}" for its in WAYS)], rows) + said


def _kinds(results: Sequence[Result]) -> str:
    kinds = list(dict.fromkeys(kind for one in results for kind in one.kinds))
    rows = [[f"`{one.name}`", *(f"{one.mean('kl', kind).value:.5f}" for kind in kinds)] for one in results]
    return _table(["KL, nats a token", *kinds], rows)


def _speeds(speeds: Sequence[Speed]) -> str:
    rows = [[f"`{one.plan}`", f"{one.encode:.2f}", f"{one.decode:.2f}", f"{one.block_nbytes:,}"] for one in speeds]
    return _table(["plan", "encode", "decode", "bytes of a block"], rows)


def _percent(share: float) -> str:
    return f"{share:.1%}".replace(".0%", "%")
