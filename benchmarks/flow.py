"""What does a flow hold of a sequence's KV, and what does that cost?

SmolLM2-135M-Instruct in float32 on one thread; texts are those of `benchmarks/quality`, three of a kind put together.

* `flow.saved.4k`, `flow.saved.16k`: share of the native cache's bytes (in bfloat16) that a flow with the default recipe
  does not hold after a prompt of 4,096 and 16,384 tokens: every tensor and buffer counts, scratch and tables of the
  pruner too. 16,384 is more than the model's positions: the KV of 4,096 tokens four times over, for the bytes alone.
* `flow.saved.4k.RECIPE`, `flow.kl.4k.RECIPE`, `flow.top1.4k.RECIPE`: the same of other recipes; and the divergence of
  predictions from those over the full cache, nats a token, and how often the most probable token is the same: the next
  256 tokens of a text, 32 in a call, so that what ages and what leaves does so between them.
* `flow.prune_share`: what pruning a cache of 8,192 tokens takes, looking at attention included, over decoding the 100
  tokens between two prunings (`snap_kv(0.7)`); `.mass`: the same where attention is summed over all queries (`h2o`).
* `flow.step`: how much longer a step takes than with a DynamicCache in float32, 4,096 tokens, default recipe.

`--recipe`, as often as wanted: these in place of the table's. `--smoke`: 512 tokens, one text, two recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks._harness import Figure, emit, paired, parser, seconds
from benchmarks.quality.interval import Mean, mean
from benchmarks.quality.model import load
from benchmarks.quality.texts import texts
from kvtier.connectors.transformers.forward import cache_argument
from kvtier.flow import FlowCache
from kvtier.flow.rows import Part
from kvtier.pruning import watched

RECIPES = {
    "default": "default",
    "raw": "raw",
    "int8": "int8",
    "k8v4": "k8v4",
    "int4": "int4",
    "int4_recent256": "int4;recent:256",
    "int3": "int3",
    "int8_snap5": "int8*snap_kv(0.5)",
    "int4_snap7": "int4*snap_kv(0.7)",
    "int4_snap5": "int4*snap_kv(0.5)",
    "int3_snap7": "int3*snap_kv(0.7)",
    "raw_snap3": "raw*snap_kv(0.3)",
    "split": "split",
}
SCORED, CALL, LAST = 256, 32, 64
"""Tokens that are scored, those of them in one call, and the last of a context, whose attention is seen."""


@dataclass(frozen=True)
class Passage:
    """A context's exact KV, its last tokens and what follows, and what the model says of that over the exact KV."""

    kv: list[Part]
    last: torch.Tensor
    next: torch.Tensor
    exact: torch.Tensor


def passages(model: Any, tokenizer: Any, context: int, count: int) -> Iterator[Passage]:
    """Three texts of a kind, one after the other, and where the third goes on."""
    everything = texts()
    for kind in list(dict.fromkeys(text.kind for text in everything))[:count]:
        ids = tokenizer("\n\n".join(text.read() for text in everything if text.kind == kind), return_tensors="pt")
        ids = ids.input_ids[0, : context + SCORED + 1]
        cache: Any = DynamicCache(config=model.config)
        run(model, cache, ids[: context - LAST], 0)
        kv = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
        run(model, cache, ids[context - LAST : context], context - LAST)
        logits = [run(model, cache, part, context + CALL * i) for i, part in enumerate(ids[context:-1].split(CALL))]
        yield Passage(kv, ids[context - LAST : context], ids[context:], torch.cat(logits).double().log_softmax(-1))


@torch.no_grad()
def run(model: Any, cache: Any, ids: torch.Tensor, position: int) -> torch.Tensor:
    places = torch.arange(position, position + len(ids))[None]
    return model(input_ids=ids[None], position_ids=places, use_cache=True, **{cache_argument(model): cache}).logits[0]


def begun(model: Any, recipe: str, passage: Passage, *, times: int = 1) -> FlowCache:
    """A flow's cache with the context in it, `times` over, computed and settled."""
    kv = [(keys.repeat(1, times, 1), values.repeat(1, times, 1)) for keys, values in passage.kv]
    cache = FlowCache(model, recipe, prompt=kv[0][0].shape[1] + LAST)
    cache.load(kv)
    with watched(model, cache.pruner) if cache.pruner else torch.no_grad():
        run(model, cache, passage.last, cache.tokens)
    cache.upkeep()
    return cache


def loss(model: Any, recipe: str, passage: Passage) -> tuple[float, float, float]:
    """Share that is saved with the context there; KL and agreement over what follows."""
    cache = begun(model, recipe, passage)
    first, *rest = passage.next[:-1].split(CALL)
    with watched(model, cache.pruner) if cache.pruner else torch.no_grad():
        logits = [run(model, cache, first, cache.tokens)]
        saved = cache.report.saved
        logits += [run(model, cache, part, cache.tokens) for part in rest]
    lossy = torch.cat(logits).double().log_softmax(-1)
    kl = float((passage.exact.exp() * (passage.exact - lossy)).sum(-1).mean())
    return saved, kl, float((passage.exact.argmax(-1) == lossy.argmax(-1)).double().mean())


def prune_share(model: Any, policy: str, passage: Passage, held: int, steps: int) -> Figure:
    """Time of looking at the attention of some steps and of pruning after them, over that of the steps alone."""
    recipe = f"int4*{policy};every:{steps}"
    cache = begun(model, recipe, passage, times=round(held / 0.7 / passage.kv[0][0].shape[1]))
    tokens = int(cache.stores[0].tokens[0])
    clock = Clock(cache.pruner.observe)
    cache.pruner.observe = clock
    with watched(model, cache.pruner):
        all_steps = seconds(lambda: [run(model, cache, passage.last[:1], cache.tokens) for _ in range(steps)])
        deciding = seconds(cache.upkeep)
    if int(cache.stores[0].tokens[0]) >= tokens + steps:
        raise RuntimeError("nothing was pruned")
    share = (clock.seconds + deciding) / (all_steps - clock.seconds)
    extra = {
        "tokens": tokens,
        "observe_seconds": round(clock.seconds, 3),
        "prune_seconds": round(deciding, 3),
        "decode_seconds": round(all_steps - clock.seconds, 3),
    }
    name = "flow.prune_share" + (".mass" if "h2o" in policy else "")
    return Figure(name, round(share, 4), "share", "lower", extra)


def step(model: Any, passage: Passage) -> Figure:
    """One token after another, in turn over the one cache and the other."""
    flow, native = begun(model, "default", passage), DynamicCache(config=model.config)
    for layer, (keys, values) in zip(native.layers, passage.kv, strict=True):
        layer.lazy_initialization(keys[None], values[None])
        layer.keys, layer.values = keys[None], values[None]
    token = passage.last[:1]
    ratios = paired(
        lambda: run(model, native, token, native.get_seq_length()),
        {"flow": lambda: run(model, flow, token, flow.tokens)},
    )
    return ratios["flow"].overhead("flow.step", tokens=flow.tokens)


class Clock:
    """A function, and how long it took in all."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds += seconds(lambda: self._function(*args, **kwargs))


def figures(recipes: dict[str, str], *, smoke: bool) -> Iterator[Figure]:
    model, tokenizer = load(None, 1)
    torch.set_num_threads(1)
    context, count, held, steps = (512, 1, 512, 10) if smoke else (4096, 4, 8192, 100)
    read = list(passages(model, tokenizer, context, count))
    for size, times in (("4k", 1), ("16k", 4)):
        cache = begun(model, "default", read[0], times=times)
        run(model, cache, read[0].next[:1], cache.tokens)
        saved = cache.report
        extra = {"tokens": saved.tokens, "native": saved.native, "held": saved.held, "scratch": saved.scratch}
        yield Figure(f"flow.saved.{size}", round(saved.saved, 4), "share", "higher", extra)
    for name, recipe in recipes.items():
        found = [loss(model, recipe, passage) for passage in read]
        saved, kl, top = (mean(values) for values in zip(*found, strict=True))
        yield Figure(f"flow.saved.4k.{name}", round(saved.value, 4), "share", "higher", {"recipe": recipe})
        each = {"each": [round(one, 6) for _, one, _ in found]}
        yield Figure(f"flow.kl.4k.{name}", round(kl.value, 6), "nats a token", "lower", _interval(kl) | each)
        yield Figure(f"flow.top1.4k.{name}", round(top.value, 4), "share", "higher", _interval(top))
    for policy in ("snap_kv(0.7)", "h2o(0.7)"):
        yield prune_share(model, policy, read[0], held, steps)
    yield step(model, read[0])


def _interval(found: Mean) -> dict[str, object]:
    return {} if found.half is None else {"half": round(found.half, 6)}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--recipe", action="append", default=[], help="a recipe in place of the table's")
    chosen = arguments.parse_args()
    table = {recipe: recipe for recipe in chosen.recipe} or RECIPES
    if chosen.smoke:
        table = {name: table[name] for name in list(table)[:2]}
    emit(figures(table, smoke=chosen.smoke), as_json=chosen.json)


if __name__ == "__main__":
    main()
