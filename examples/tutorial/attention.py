"""How concentrated attention is: how much of it a tenth of the tokens gets, layer by layer.

python -m examples.tutorial.attention [--out FOLDER] [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file, not with -m
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from examples.tutorial._common import figure, model_for, options, passages, save, table
from kvtier.pruning import Evidence

QUERIES = 128
"""Of each text, the last ones of its context. Their weights are there for one layer at a time."""
PART = 0.1


def weights(layer: Evidence) -> torch.Tensor:
    """What each query of the window gives to each token, `[heads, queries, tokens]`."""
    queries, (heads, tokens) = layer.queries, layer.positions.shape
    keys = layer.keys.repeat_interleave(len(queries) // heads, 0)
    logits = layer.scale * queries @ keys.transpose(1, 2)
    count = queries.shape[1]
    hidden = torch.ones(count, tokens, dtype=torch.bool).triu_(tokens - count + 1)
    return logits.masked_fill_(hidden, -torch.inf).softmax(-1)


def concentration(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By head: the share of the top tenth, that of the first token, and the top tenth's share of all the others."""
    top = max(1, round(PART * given.shape[2]))
    first = given[..., 0]
    others = given[..., 1:]
    shares = given.topk(top).values.sum(-1), first, others.topk(top).values.sum(-1) / (1 - first).clamp(min=1e-6)
    return tuple(share.mean(-1) for share in shares)


def main() -> None:
    """Watch a prefill, and look at the attention of its last queries."""
    asked = options(__doc__)
    model, tokenizer = model_for(asked)
    read = passages(model, tokenizer, asked, window=QUERIES)
    by_text = [[torch.stack(concentration(weights(layer))) for layer in passage.evidence] for passage in read]
    shares = torch.tensor([[layer.tolist() for layer in text] for text in by_text]).mean(0)  # [layers, 3, heads]
    mean = shares.mean(2)
    layers = len(mean)
    table(
        ["layers", "top 10 % of tokens", "first token", "top 10 % of the others' mass"],
        [
            [f"{begin}-{end - 1}", *(f"{share:.1%}" for share in mean[begin:end].mean(0))]
            for begin, end in ((part * layers // 6, (part + 1) * layers // 6) for part in range(6))
        ]
        + [["all", *(f"{share:.1%}" for share in mean.mean(0))]],
    )
    tops = shares[:, 0].flatten()
    print(f"a head's top 10 % get {tops.min():.1%} at least, {tops.max():.1%} at most")

    made, (left, right) = figure(2)
    names = ("top 10 % of tokens", "first token", "top 10 % of the others")
    for number, name in enumerate(names):
        left.plot(mean[:, number], "o-", markersize=3, label=name)
    left.fill_between(range(layers), shares[:, 0].amin(1), shares[:, 0].amax(1), alpha=0.15, label="heads, top 10 %")
    left.axhline(PART, color="grey", linestyle="--", linewidth=1)
    left.set(xlabel="layer", ylabel="share of attention", title="By layer", ylim=(0, 1.02))
    left.legend(fontsize=7)
    drawn = right.imshow(shares[:, 1].T, origin="lower", aspect="auto", cmap="magma", vmin=0, vmax=1)
    right.set(xlabel="layer", ylabel="head", title="What the first token gets")
    made.colorbar(drawn, ax=right)
    save(made, asked, "attention")


if __name__ == "__main__":
    main()
