"""Generation with a KV cache and without: what is computed, how long it takes, what it holds.

python -m examples.tutorial.generation [--out FOLDER] [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file, not with -m
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import time
from itertools import pairwise
from typing import Any

import torch
from transformers import DynamicCache

from examples.tutorial._common import figure, model_for, options, save, table
from kvtier.connectors.transformers.forward import cache_argument

TOKENS = 100


class Counter:
    """Counts the tokens that a model's layers compute, by looking at what its first layer is given."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        model.model.layers[0].register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, layer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = given[0] if given else named["hidden_states"]
        self.tokens += hidden.shape[0] * hidden.shape[1]


def nbytes(cache: Any) -> int:
    """Of the keys and values that a cache holds."""
    return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))


@torch.inference_mode()
def generate(
    model: Any, ids: torch.Tensor, *, cached: bool, tokens: int = TOKENS
) -> tuple[list[int], list[float], list[int]]:
    """Choose tokens greedily; these, the seconds of each step, and the bytes of the cache after it."""
    cache = DynamicCache(config=model.config)
    answer: list[int] = []
    seconds, held = [], []
    for _ in range(tokens):
        began = time.perf_counter()
        if cached:
            new = ids if not answer else torch.tensor([answer[-1:]])
            logits = model(new, **{cache_argument(model): cache}).logits
            held.append(nbytes(cache))
        else:
            everything = torch.cat([ids, torch.tensor([answer], dtype=ids.dtype)], 1)
            logits = model(everything, use_cache=False, logits_to_keep=1).logits
        answer.append(int(logits[0, -1].argmax()))
        seconds.append(time.perf_counter() - began)
    return answer, seconds, held


@torch.inference_mode()
def step_seconds(model: Any, batch: int, length: int, *, cached: bool) -> float:
    """Time of one more token for each row of a batch; with a cache, the better of two."""
    ids = torch.randint(10, 1000, (batch, length), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    if cached:
        model(ids, **{cache_argument(model): cache}, logits_to_keep=1)
    times = []
    for _ in range(1 + cached):
        began = time.perf_counter()
        if cached:
            model(ids[:, -1:], **{cache_argument(model): cache})
        else:
            model(ids, use_cache=False, logits_to_keep=1)
        times.append(time.perf_counter() - began)
    return min(times)


def surface(axes: Any, times: list[list[float]], batches: list[int], lengths: list[int], title: str) -> None:
    """Draw times over batch and length, each with its figure."""
    from matplotlib.colors import LogNorm

    drawn = axes.imshow(times, origin="lower", aspect="auto", norm=LogNorm(0.02, 20), cmap="viridis")
    axes.set_xticks(range(len(lengths)), lengths)
    axes.set_yticks(range(len(batches)), batches)
    axes.set(title=title, xlabel="tokens so far", ylabel="batch")
    for row, line in enumerate(times):
        for column, seconds in enumerate(line):
            axes.text(column, row, f"{seconds:.2f}", ha="center", va="center", color="white", fontsize=8)
    axes.figure.colorbar(drawn, ax=axes, label="s a step")


def main() -> None:
    """Generate both ways, then time single steps over batch and length."""
    asked = options(__doc__)
    model, _ = model_for(asked)
    counter = Counter(model)
    prompt = torch.tensor([[1]])
    generate(model, prompt, cached=True, tokens=5)  # the first run finds its kernels
    counter.tokens = 0
    answer, with_cache, held = generate(model, prompt, cached=True)
    computed_with, counter.tokens = counter.tokens, 0
    same, without_cache, _ = generate(model, prompt, cached=False)
    computed_without = counter.tokens
    print(f"the same {TOKENS} tokens both ways: {'yes' if answer == same else 'no'}")
    table(
        ["100 tokens", "token computations", "s in all", "first step, ms", "last 10 steps, ms"],
        [
            [name, f"{count:,}", f"{sum(times):.2f}", f"{1e3 * times[0]:.0f}", f"{1e2 * sum(times[-10:]):.0f}"]
            for name, count, times in (
                ("with a cache", computed_with, with_cache),
                ("without", computed_without, without_cache),
            )
        ],
    )
    growth = {after - before for before, after in pairwise(held)}
    print(f"bytes of the cache a token: {', '.join(f'{each:,}' for each in sorted(growth))}")

    batches, lengths = ([1, 2], [32, 64]) if asked.quick else ([1, 2, 4], [32, 64, 128, 256, 512])
    times = {
        cached: [[step_seconds(model, batch, length, cached=cached) for length in lengths] for batch in batches]
        for cached in (True, False)
    }
    table(
        ["one step: batch x tokens", "with a cache, ms", "without, ms", "ratio"],
        [
            [f"{batch} x {length}", f"{1e3 * a:.0f}", f"{1e3 * b:.0f}", f"{b / a:.1f}"]
            for batch, line_a, line_b in zip(batches, times[True], times[False], strict=True)
            for length, a, b in zip(lengths, line_a, line_b, strict=True)
        ],
    )
    made, ((steps, memory), (left, right)) = figure(2, rows=2, size=(9.5, 6.4))
    steps.plot([1e3 * each for each in without_cache], label="without")
    steps.plot([1e3 * each for each in with_cache], label="with a cache")
    steps.set(xlabel="token", ylabel="ms a step", title="One step", ylim=(0, None))
    steps.legend()
    memory.plot([each / 2**20 for each in held])
    memory.set(xlabel="token", ylabel="MiB", title="What the cache holds, float32", ylim=(0, None))
    surface(left, times[True], batches, lengths, "A step with a cache")
    surface(right, times[False], batches, lengths, "A step without")
    save(made, asked, "generation")


if __name__ == "__main__":
    main()
