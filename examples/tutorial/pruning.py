"""Pruning: which tokens three policies keep, and what that costs the model.

python -m examples.tutorial.pruning [--out FOLDER] [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file, not with -m
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from statistics import fmean
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.quality.passage import Passage
from examples.tutorial._common import figure, model_for, options, passages, save, table
from kvtier.connectors.transformers.forward import cache_argument
from kvtier.pruning import Kept, Policy, h2o, snap_kv, streaming_llm

WINDOW = 32
BUDGETS = (0.75, 0.5, 0.25, 0.125)
SHOWN = 0.25


def policies(keep: float, context: int) -> dict[str, Policy]:
    """Three presets that keep as many tokens of every KV head."""
    return {
        "h2o": h2o(keep, whole=0),
        "snap_kv": snap_kv(keep, window=WINDOW, whole=0),
        "streaming_llm": streaming_llm(sinks=4, recent=round(keep * context) - 4),
    }


def choose(policy: Policy, passage: Passage) -> list[Kept]:
    """What stays of each layer of a context."""
    layers = len(passage.evidence)
    return [policy.choose(its, layer=layer, layers=layers) for layer, its in enumerate(passage.evidence)]


@torch.no_grad()
def cost(model: Any, passage: Passage, kept: list[Kept]) -> float:
    """KL of what the model says over what stays from what it says over all, nats a token."""
    cache: Any = DynamicCache(config=model.config)
    for layer, its, (keys, values) in zip(cache.layers, kept, passage.kv, strict=True):
        left = [its.gather(part.transpose(0, 1).to(model.dtype))[None] for part in (keys, values)]
        layer.lazy_initialization(*left)
        layer.keys, layer.values = left
    begin = len(passage.kv[0][0])  # tokens keep their positions, and so do those that come
    places = torch.arange(begin, begin + len(passage.ids) - 1)[None]
    logits = model(passage.ids[None, :-1], position_ids=places, **{cache_argument(model): cache}).logits[0]
    lossy = logits.double().log_softmax(-1)
    return float((passage.exact.exp() * (passage.exact - lossy)).sum(-1).mean())


def picture(kept: list[Kept], context: int) -> torch.Tensor:
    """The part of a layer's KV heads that hold each token, `[layers, tokens]`."""
    seen = torch.zeros(len(kept), context)
    for layer, its in enumerate(kept):
        for head in its.positions:
            seen[layer, head.long()] += 1 / len(its.positions)
    return seen


def main() -> None:
    """Prune the context of some texts, and let the model read on."""
    asked = options(__doc__)
    model, tokenizer = model_for(asked)
    read = passages(model, tokenizer, asked, window=WINDOW)
    context = len(read[0].kv[0][0])
    losses: dict[str, list[float]] = {}
    maps: dict[str, torch.Tensor] = {}
    for keep in BUDGETS:
        for name, policy in policies(keep, context).items():
            kept = [choose(policy, passage) for passage in read]
            if keep == SHOWN:
                maps[name] = picture(kept[0], context)
            costs = [cost(model, passage, its) for passage, its in zip(read, kept, strict=True)]
            losses.setdefault(name, []).append(fmean(costs))
    table(
        ["kept, KL in nats a token", *losses],
        [
            [f"{keep * context:,.0f} of {context:,} tokens", *(f"{line[number]:.4f}" for line in losses.values())]
            for number, keep in enumerate(BUDGETS)
        ],
    )
    alike = [f"{name} {float((its > 0.99).sum() / (its > 0).sum()):.0%}" for name, its in maps.items()]
    print(f"at {SHOWN:.0%}, of the tokens that some KV head of a layer keeps all its heads keep: {', '.join(alike)}")

    made, axes = figure(4, size=(12.0, 3.4))
    for place, (name, its) in zip(axes, maps.items(), strict=False):
        draw(place, its, f"{name}, {SHOWN:.0%} kept")
    for name, line in losses.items():
        axes[3].plot(BUDGETS, line, "o-", label=name)
    axes[3].set(xlabel="share of the tokens kept", ylabel="KL, nats a token", title="What it costs", yscale="log")
    axes[3].legend()
    save(made, asked, "pruning")


def draw(axes: Any, kept: torch.Tensor, title: str) -> None:
    """Draw what each layer keeps: dark where all its KV heads do."""
    axes.imshow(kept, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="antialiased")
    axes.set(title=title, xlabel="token", ylabel="layer")


if __name__ == "__main__":
    main()
