"""Precision by layer: which layers bear few bits, and whether a split by layers is worth its bytes.

python -m examples.tutorial.layers [--out FOLDER] [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file, not with -m
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

from benchmarks.quality.loss import loss
from benchmarks.quality.passage import Passage
from benchmarks.quality.stored import KV, stored
from examples.tutorial._common import figure, model_for, options, passages, save, stored_spec, table
from kvtier.codecs.plan import canonical, parse_plan, resolve

INT2 = "sinks:1(K=int2/channel:64/asym,V=int2/token/sym/hadamard/lloyd)"
THIRDS = {"bottom": "0-1/3", "middle": "1/3-2/3", "top": "2/3-1"}


def one_third(plan: str, third: str) -> str:
    """One third of the layers by this plan, the others as they are."""
    rest = ";".join(f"{place}:raw" for name, place in THIRDS.items() if name != third)
    return f"layers({THIRDS[third]}:{plan};{rest})"


def splits() -> dict[str, str]:
    """`layered`, the same the other way round, and no split at all."""
    return {
        "layered": "layered",
        "layered, raw below": "layers(0-5/16:raw;5/16-11/16:int8;11/16-1:int4)",
        "half raw, half int4": "layers(0-1/2:int4;1/2-1:raw)",
        "half raw below": "layers(0-1/2:raw;1/2-1:int4)",
        "int8": "int8",
        "k8v4": "k8v4",
    }


def likeness(kv: KV) -> tuple[list[float], list[float]]:
    """Of K and of V: how far each layer is from the best multiple of the one below, relative to itself.

    1 is as far as nothing at all: a layer of zeros is that far off.
    """
    far: tuple[list[float], list[float]] = ([], [])
    for below, above in pairwise(kv):
        for number in (0, 1):
            x, y = below[number].double().flatten(), above[number].double().flatten()
            scale = (x @ y) / (x @ x)
            far[number].append(float((y - scale * x).norm() / y.norm()))
    return far


def mapped(read: list[Passage], number: int) -> list[float]:
    """How far K (0) or V (1) of each layer is from what a linear map makes of the layer below, relative to itself.

    The map is of all channels, with a constant, fitted to three quarters of the tokens and measured on the rest: of
    four texts, on the fourth.
    """
    layers = [
        torch.cat([passage.kv[layer][number].double().flatten(1) for passage in read])
        for layer in range(len(read[0].kv))
    ]
    seen = len(layers[0]) * 3 // 4
    far = []
    for below, above in pairwise(layers):
        known = torch.cat([below, torch.ones(len(below), 1, dtype=torch.double)], 1)
        fitted = torch.linalg.lstsq(known[:seen], above[:seen]).solution
        far.append(float((above[seen:] - known[seen:] @ fitted).norm() / above[seen:].norm()))
    return far


def costs(model: Any, read: list[Passage], plans: dict[str, str]) -> dict[str, tuple[float, float]]:
    """Bits a value and KL of each plan, means over the texts."""
    spec = stored_spec(model)
    found = {}
    for name, plan in plans.items():
        lines = []
        for passage in read:
            given, bits = stored(passage.kv, spec, plan)
            lines.append((bits, loss(model, passage, given).kl))
        found[name] = (fmean(bits for bits, _ in lines), fmean(kl for _, kl in lines))
    return found


def by_layer(model: Any, read: list[Passage], plan: str) -> list[float]:
    """Bits a value of each layer, as its plan stores it."""
    spec = stored_spec(model)
    made: dict[str, float] = {}
    for layer in resolve(parse_plan(plan), spec):
        text = canonical((layer,))
        if text not in made:
            made[text] = stored(read[0].kv, spec, text)[1]
    return [made[canonical((layer,))] for layer in resolve(parse_plan(plan), spec)]


def main() -> None:
    """Store one third of the layers in few bits, then compare splits."""
    asked = options(__doc__)
    model, tokenizer = model_for(asked)
    read = passages(model, tokenizer, asked)
    thirds = {
        f"{third}, {name}": one_third(plan, third)
        for name, plan in (("int4", "int4"), ("int2", INT2))
        for third in THIRDS
    }
    tolerated = costs(model, read, thirds)
    table(
        ["only this third", "bits a value", "KL, nats"],
        [[n, f"{b:.2f}", f"{kl:.5f}"] for n, (b, kl) in tolerated.items()],
    )
    print()
    compared = costs(model, read, splits())
    table(["split", "bits a value", "KL, nats"], [[n, f"{b:.2f}", f"{kl:.5f}"] for n, (b, kl) in compared.items()])
    far = [likeness(passage.kv) for passage in read]
    keys, values = (torch.tensor([text[number] for text in far]).mean(0) for number in (0, 1))
    print(
        f"a layer from the best multiple of the one below: K {keys.mean():.0%} ({keys.min():.0%} to {keys.max():.0%}), "
        f"V {values.mean():.0%} ({values.min():.0%} to {values.max():.0%})"
    )
    # One text has too few tokens for a map of all channels.
    maps = {} if asked.quick else {name: torch.tensor(mapped(read, number)) for number, name in enumerate("KV")}
    for name, its in maps.items():
        print(f"{name} from what a linear map makes of it: {its.mean():.0%} ({its.min():.0%} to {its.max():.0%})")

    made, (left, middle, right) = figure(3, size=(13.0, 3.6))
    for at, name in enumerate(("int4", "int2")):
        heights = [tolerated[f"{third}, {name}"][1] for third in THIRDS]
        left.bar([place + 0.4 * at for place in range(3)], heights, 0.4, label=name)
    left.set_xticks([0.2, 1.2, 2.2], list(THIRDS))
    left.set(ylabel="KL, nats a token", title="Only this third in few bits", yscale="log")
    left.legend()
    for name in ("layered", "int8", "k8v4"):
        middle.step(range(len(read[0].kv)), by_layer(model, read, splits()[name]), where="mid", label=name)
    middle.set(xlabel="layer", ylabel="bits a value", title="Layer map", ylim=(0, 17))
    middle.legend()
    right.plot(range(1, len(keys) + 1), keys, "o-", markersize=3, label="K, multiple", color="C0")
    right.plot(range(1, len(values) + 1), values, "s-", markersize=3, label="V, multiple", color="C1")
    for number, (name, its) in enumerate(maps.items()):
        right.plot(range(1, len(its) + 1), its, "--", label=f"{name}, linear map", color=f"C{number}")
    right.set(xlabel="layer", ylabel="relative distance", title="From what the layer below gives", ylim=(0, None))
    right.legend(fontsize=7, loc="lower left", ncols=2)
    save(made, asked, "layers")


if __name__ == "__main__":
    main()
