"""A table of measured strategies: what `docs/quality.md` has of plans, and two prunings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtier.advisor.strategies import Measured, Strategy, read_measured

PLANS = {
    "raw": (16.0, 0.0, 0.0, 1.0),
    "layered": (9.55, 0.00049, 0.00012, 0.989),
    "int8": (8.5, 0.00002, 0.00001, 0.998),
    "fp8": (8.38, 0.00071, 0.00018, 0.99),
    "k8v4": (6.39, 0.00038, 0.00006, 0.992),
    "int4": (4.51, 0.00405, 0.00173, 0.978),
    "int3": (3.39, 0.01163, 0.00193, 0.955),
}
"""Bits, KL, half of its interval, top-1."""
PRUNED = {"h2o(keep=0.5)": (0.5, 0.0135, 0.004, 0.95), "snap_kv(keep=0.25)": (0.25, 0.072, 0.01, 0.88)}


def strategy(name: str, plan: str, **rest: Any) -> dict[str, Any]:
    known = {
        "name": name, "plan": plan, "canonical": plan, "policy": None, "preset": None, "keep": 1.0, "bits": 16.0,
        "share": 1.0, "kl": [0.0, 0.0], "dnll": [0.0, 0.0], "top1": [1.0, 0.0],
    }  # fmt: skip
    return known | rest


def table() -> dict[str, Any]:
    strategies = [
        strategy(plan, plan, bits=bits, share=bits / 16, kl=[kl, half], top1=[top1, 0.002])
        for plan, (bits, kl, half, top1) in PLANS.items()
    ]
    for name, (keep, kl, half, top1) in PRUNED.items():
        pruned = {"policy": f"prune/1({name})", "preset": name, "keep": keep}
        strategies.append(strategy(name, "raw", share=keep, kl=[kl, half], top1=[top1, 0.01], **pruned))
        both = {"bits": 4.52, "share": keep * 4.52 / 16, "kl": [kl + 0.005, half], "top1": [top1 - 0.01, 0.01]}
        strategies.append(strategy(f"int4*{name}", "int4", **pruned | both))
    speeds = {"raw": 1.0, "int8": 1.6, "k8v4": 1.3, "int4": 1.2, "int3": 0.9}
    return {
        "format": 1, "model": "Small (q4)", "date": "2026-11-30", "context": 1024, "tokens": 256,
        "texts": [{"name": "a", "kind": "prose"}, {"name": "b", "kind": "code"}, {"name": "c", "kind": "prose"}],
        "strategies": strategies,
        "speed": [
            {"plan": plan, "encode": 0.5, "decode": fast, "block_nbytes": 1000, "what": "of memcpy, one thread"}
            for plan, fast in speeds.items()
        ],
    }  # fmt: skip


def write(path: Path, said: dict[str, Any] | None = None) -> Path:
    path.write_text(json.dumps(table() if said is None else said))
    return path


def read(path: Path, *strategies: dict[str, Any]) -> Measured:
    """A table of these strategies alone."""
    return read_measured(write(path, table() | {"strategies": list(strategies)}))


def by_name(measured: Measured, name: str) -> Strategy:
    return next(one for one in measured.strategies if one.name == name)
