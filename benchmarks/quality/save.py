"""The measured file, which `kvtier advise` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.quality.measure import Result
from benchmarks.quality.report import METRICS, digits
from benchmarks.quality.speed import WHAT, Speed
from benchmarks.quality.strategies import CONTROLS
from benchmarks.quality.texts import Text

FORMAT = 1


def save(
    file: Path,
    results: Sequence[Result],
    speeds: Sequence[Speed],
    texts: Sequence[Text],
    *,
    model: str,
    context: int,
    tokens: int,
) -> None:
    """Write everything that was measured, but for what is wrong on purpose.

    A mean is `[mean, half of the 95 % interval]`, the latter null for one text alone.
    """
    content = {
        "format": FORMAT,
        "model": model,
        "date": date.today().isoformat(),
        "context": context,
        "tokens": tokens,
        "texts": [{"name": text.name, "kind": text.kind} for text in texts],
        "strategies": [_strategy(one) for one in results if one.strategy.group != CONTROLS],
        "speed": [
            {
                "plan": one.plan,
                "encode": one.encode,
                "decode": one.decode,
                "block_nbytes": one.block_nbytes,
                "what": WHAT,
            }
            for one in speeds
        ],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_lines(content), encoding="utf-8")


def _lines(content: dict[str, Any]) -> str:
    """JSON with one line an entry of each list, so that two measurements can be compared line by line."""
    made = []
    for name, value in content.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n  " + ",\n  ".join(json.dumps(entry) for entry in value) + "\n ]"
        made.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(made) + "\n}\n"


def _strategy(one: Result) -> dict[str, Any]:
    metrics = {metric: one.mean(metric) for metric in METRICS}
    return {
        "name": one.name,
        "plan": one.strategy.plan,
        "canonical": one.plan,
        "policy": one.policy,
        "preset": one.strategy.pruning,
        "keep": digits(one.keep),
        **_by_layer(one.keep_layers),
        "bits": digits(one.bits),
        "share": digits(one.share),
        **{
            metric: [digits(found.value), None if found.half is None else digits(found.half)]
            for metric, found in metrics.items()
        },
    }


def _by_layer(keep: Sequence[float]) -> dict[str, list[float]]:
    """Shares of the layers, where they differ."""
    shares = [digits(share) for share in keep]
    return {"keep_layers": shares} if len(set(shares)) > 1 else {}
