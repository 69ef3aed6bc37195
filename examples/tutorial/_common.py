"""What the scripts share: options, the model, its readings of texts, tables, pictures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._model import model as packaged
from benchmarks.quality.model import load
from benchmarks.quality.passage import Passage, read
from benchmarks.quality.texts import texts
from benchmarks.quality.unusable import Unusable
from kvtier.connectors.transformers import spec_for
from kvtier.errors import KVTierError
from kvtier.spec import KVSpec


def options(description: str) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the picture; default: this one")
    parser.add_argument("--model", help="folder or name of a causal language model; default: SmolLM2-135M-Instruct")
    parser.add_argument("--threads", type=threads, default=1, help="that the model computes on; default: 1")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    asked = parser.parse_args()
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SystemExit("pictures need matplotlib: pip install 'kvtier[plot]'") from None
    asked.out.mkdir(parents=True, exist_ok=True)
    return asked


def threads(text: str) -> int:
    """A number of threads."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; pass 1 or more")
    return int(text)


def model_for(asked: argparse.Namespace) -> tuple[Any, Any]:
    """The model, in float32, and its tokenizer."""
    try:
        return load(asked.model or str(packaged()), asked.threads)
    except (Unusable, KVTierError) as exc:
        raise SystemExit(str(exc)) from None


def passages(model: Any, tokenizer: Any, asked: argparse.Namespace, *, window: int = 0) -> list[Passage]:
    """One text of each kind as the model reads it: 1,024 tokens of context, 256 that follow; quick: one, 256 and 64."""
    context, tokens, count = (256, 64, 1) if asked.quick else (1024, 256, 4)
    try:
        return [read(model, tokenizer, text, context, tokens, window=window) for text in texts()[:count]]
    except Unusable as exc:
        raise SystemExit(str(exc)) from None


def stored_spec(model: Any) -> KVSpec:
    """The model's KV in bfloat16, as an engine keeps it."""
    return replace(spec_for(model), dtype="bfloat16")


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under a header, in columns."""
    text = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    for row in text:
        first, *rest = (
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())


def figure(columns: int, *, rows: int = 1, size: tuple[float, float] = (9.0, 3.6)) -> tuple[Any, Any]:
    """A picture and its axes, for `save`."""
    from matplotlib.figure import Figure

    made = Figure(figsize=size, layout="constrained")
    axes = made.subplots(rows, columns)
    return made, axes


def save(made: Any, asked: argparse.Namespace, name: str) -> None:
    """Write a picture to the folder that was asked for."""
    path = asked.out / f"{name}.png"
    made.savefig(path, dpi=110)
    print(f"picture: {path}")
