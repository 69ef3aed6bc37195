"""Quantisation: how far K, V and attention are off, and what the model loses, by bits.

python -m examples.tutorial.quantisation [--out FOLDER] [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file, not with -m
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from statistics import fmean

import torch

from benchmarks.quality.loss import loss
from benchmarks.quality.passage import Passage
from benchmarks.quality.stored import KV, stored
from examples.tutorial._common import figure, model_for, options, passages, save, stored_spec, table
from kvtier.codecs.plan import NAMED

WINDOW = 32


def off(exact: torch.Tensor, given: torch.Tensor) -> float:
    """Root of the mean squared error, relative to that of the values."""
    return float((exact.float() - given.float()).norm() / exact.float().norm())


def attended(passage: Passage, kv: KV, layer: int) -> torch.Tensor:
    """What the last queries of the context read from this KV, `[heads, queries, head_dim]`."""
    queries = passage.evidence[layer].queries
    keys, values = (part.float().transpose(0, 1) for part in kv[layer])
    tokens, count = keys.shape[1], queries.shape[1]
    sees = torch.ones(count, tokens, dtype=torch.bool).tril_(tokens - count)
    return torch.nn.functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], sees, scale=passage.evidence[layer].scale, enable_gqa=True
    )[0]


def main() -> None:
    """Put the KV of some texts through every named plan."""
    asked = options(__doc__)
    model, tokenizer = model_for(asked)
    spec = stored_spec(model)
    found: dict[str, list[float]] = {}
    read = passages(model, tokenizer, asked, window=WINDOW)
    for plan in NAMED:
        lines = []
        for passage in read:
            given, bits = stored(passage.kv, spec, plan)
            keys, values, out = (
                fmean(each)
                for each in zip(
                    *(
                        (
                            off(exact[0], lossy[0]),
                            off(exact[1], lossy[1]),
                            off(attended(passage, passage.kv, layer), attended(passage, given, layer)),
                        )
                        for layer, (exact, lossy) in enumerate(zip(passage.kv, given, strict=True))
                    ),
                    strict=True,
                )
            )
            its = loss(model, passage, given)
            lines.append((bits, keys, values, out, its.kl, its.top1))
        found[plan] = [fmean(column) for column in zip(*lines, strict=True)]
    found = dict(sorted(found.items(), key=lambda item: -item[1][0]))
    table(
        ["plan", "bits a value", "error of K", "of V", "of attention", "KL, nats", "same top token"],
        [
            [plan, f"{bits:.2f}", f"{keys:.2%}", f"{values:.2%}", f"{out:.2%}", f"{kl:.5f}", f"{top1:.1%}"]
            for plan, (bits, keys, values, out, kl, top1) in found.items()
        ],
    )

    made, (left, right) = figure(2)
    lossy = {plan: line for plan, line in found.items() if line[4] > 0}
    bits = [line[0] for line in lossy.values()]
    for number, name, mark in ((1, "K", "o"), (2, "V", "s"), (3, "attention's output", "^")):
        left.plot(bits, [line[number] for line in lossy.values()], mark, label=name)
    left.set(xlabel="bits a value", ylabel="relative error", title="How far off", yscale="log")
    left.legend()
    right.plot(bits, [line[4] for line in lossy.values()], "o")
    for plan, line in lossy.items():
        right.annotate(plan, (line[0], line[4]), (5, 5), textcoords="offset points", fontsize=8)
    right.set(xlabel="bits a value", ylabel="KL, nats a token", title="What the model loses", yscale="log")
    right.margins(x=0.2, y=0.1)
    save(made, asked, "quantisation")


if __name__ == "__main__":
    main()
