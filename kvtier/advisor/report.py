"""What a replay found, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvtier.advisor.replay import Outcome, Payloads, Setup
from kvtier.advisor.sweep import Sweep
from kvtier.spec import KVSpec

TIERS = ("gpu", "cpu", "nvme")


def as_dict(setup: Setup, found: Sweep, spec: KVSpec, limit: float) -> dict[str, Any]:
    """All of it as plain values, bytes as integers."""
    return {
        "setup": asdict(setup),
        "block_nbytes": Payloads.of(setup.plan, spec).later,
        "ceiling": limit,
        "outcome": _outcome(found.asked),
        "sizes": [{"factor": factor} | _outcome(outcome) for factor, outcome in found.sizes.items()],
        "plans": [
            {"plan": plan, "block_nbytes": Payloads.of(plan, spec).later} | _outcome(outcome)
            for plan, outcome in found.plans.items()
        ],
    }


def as_text(setup: Setup, found: Sweep, spec: KVSpec, limit: float) -> str:
    """A page to read."""
    asked = found.asked
    block = Payloads.of(setup.plan, spec).later
    there = [name for name in TIERS if getattr(setup, name)]
    lines = [
        f"{asked.requests:,} requests in {asked.seconds / 60:,.0f} minutes ask for {asked.asked:,} blocks of "
        f"{spec.block_tokens} tokens",
        f"{setup.model}, plan {setup.plan}, {nbytes(block)} a block; policy {setup.policy}"
        + (f", admission {setup.admission}" if setup.nvme else ""),
        "",
        f"hit ratio {asked.hit_ratio:.3f}, of {limit:.3f} if nothing were ever forgotten",
    ]
    rows = [("tier", "memory", "blocks", "hits")]
    rows += [
        (
            name,
            nbytes(getattr(setup, name)),
            f"{getattr(setup, name) // block:,}",
            f"{asked.hits.get(name, 0) / max(asked.asked, 1):.3f}",
        )
        for name in there
    ]
    lines += table(rows)
    moved = ", ".join(f"{a} to {b} {nbytes(n)}" for (a, b), n in sorted(asked.moved_nbytes.items()))
    lines += ["", f"moved: {moved}"] if moved else []
    if setup.nvme:
        refused = ", ".join(f"{n:,} {why.replace('_', ' ')}" for why, n in asked.refused.items())
        lines.append(
            f"NVMe: {nbytes(asked.written_a_day)} written a day, {asked.write_amplification:.2f} for each byte given"
            + (f"; not written: {refused}" if refused else "")
        )
    lines += [f"{asked.unsaved:,} blocks found no room and were not saved"] if asked.unsaved else []
    return "\n".join([*lines, *_around(setup, found, spec)]).rstrip()


def _around(setup: Setup, found: Sweep, spec: KVSpec) -> list[str]:
    if not found.sizes:
        return []
    factors = [f"x{factor:g}" if factor >= 1 else f"x1/{1 / factor:g}" for factor in found.sizes]
    sizes = [
        ("memory", *factors),
        *(
            (name, *(nbytes(factor * getattr(setup, name)) for factor in found.sizes))
            for name in TIERS
            if getattr(setup, name)
        ),
        ("hit ratio", *(f"{outcome.hit_ratio:.3f}" for outcome in found.sizes.values())),
    ]
    plans = [
        ("plan", *found.plans),
        ("block", *(nbytes(Payloads.of(plan, spec).later) for plan in found.plans)),
        ("hit ratio", *(f"{outcome.hit_ratio:.3f}" for outcome in found.plans.values())),
    ]
    return ["", *table(sizes), "", *table(plans)]


def nbytes(number: float) -> str:
    """A number of bytes in three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:,.0f} TiB" if number >= 100 else f"{number:.3g} TiB"


def short(name: str, most: int) -> str:
    """A name in at most so many characters."""
    return name if len(name) <= most else f"{name[: most - 3]}..."


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns of equal width, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return asdict(outcome) | {
        "moved_nbytes": {">".join(way): count for way, count in outcome.moved_nbytes.items()},
        "hit_ratio": outcome.hit_ratio,
        "write_amplification": outcome.write_amplification,
        "written_a_day": outcome.written_a_day,
    }
