"""Every text, every strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.quality.interval import Mean, mean
from benchmarks.quality.loss import Loss, loss
from benchmarks.quality.passage import Passage, read
from benchmarks.quality.presets import policies
from benchmarks.quality.pruned import canonical, pruned
from benchmarks.quality.stored import stored, stored_heads
from benchmarks.quality.strategies import Strategy
from benchmarks.quality.texts import Text
from benchmarks.quality.unusable import Unusable
from kvtier.codecs import plan as plans
from kvtier.connectors.transformers import spec_for
from kvtier.errors import UnsupportedKV
from kvtier.spec import KVSpec


@dataclass(frozen=True)
class Once:
    """What one strategy did to one text.

    Attributes:
        keep: share of the tokens that is left, of each layer.
        bits: a value of these, all overhead included.
        loss: what that cost.
    """

    keep: tuple[float, ...]
    bits: float
    loss: Loss


@dataclass(frozen=True)
class Result:
    """One strategy, over all texts.

    Attributes:
        strategy: what it was.
        plan: canonical text of its plan for this model.
        policy: canonical text of its pruning; None when it drops nothing.
        whole: bits a value of the whole KV.
        texts: what it did to each.
        kinds: of the texts.
    """

    strategy: Strategy
    plan: str
    policy: str | None
    whole: int
    texts: tuple[Once, ...]
    kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.strategy.name

    @property
    def keep(self) -> float:
        """Share of the tokens that is left, mean over texts and layers."""
        return fmean(self.keep_layers)

    @property
    def keep_layers(self) -> list[float]:
        """The same of each layer."""
        return [fmean(shares) for shares in zip(*(one.keep for one in self.texts), strict=True)]

    @property
    def bits(self) -> float:
        """Bits a value of what is left, mean over the texts."""
        return fmean(one.bits for one in self.texts)

    @property
    def share(self) -> float:
        """Bytes held, of those of the whole KV in 16 bits."""
        return fmean(fmean(one.keep) * one.bits for one in self.texts) / self.whole

    @property
    def losses(self) -> list[Loss]:
        """By text."""
        return [one.loss for one in self.texts]

    def mean(self, metric: str, kind: str | None = None) -> Mean:
        """One metric over all texts, or over those of one kind."""
        of = zip(self.losses, self.kinds, strict=True)
        return mean([getattr(one, metric) for one, its in of if kind in (None, its)])


def measure(
    model: Any,
    tokenizer: Any,
    strategies: Sequence[Strategy],
    texts: Sequence[Text],
    *,
    context: int,
    tokens: int,
    say: Callable[[str], None],
) -> list[Result]:
    """Read each text once and again over what every strategy leaves of it.

    Raises:
        Unusable: a text is too short, the context is not of whole blocks, a plan cannot represent the KV, or something
            is to be pruned and the model's attention cannot be watched.
        ConfigError: a plan that this model's KV cannot follow.
        UnsupportedKV: positions are to be closed up, and the model's keys cannot be turned.
    """
    spec = replace(spec_for(model), dtype="bfloat16")
    if context < 1 or context % spec.block_tokens:
        raise Unusable(f"--context {context} is not of whole blocks: pass a multiple of {spec.block_tokens}")
    by_layer = {one: policies(one.pruning, spec.layers) for one in strategies if one.pruning}
    window = max(
        (policy.recent for its in by_layer.values() for policy in its if policy and policy.scorer.window), default=1
    )
    found: dict[Strategy, list[Once]] = {one: [] for one in strategies}
    for number, text in enumerate(texts, 1):
        say(f"text {number} of {len(texts)}: {text.name}, {text.kind}")
        try:
            passage = read(model, tokenizer, text, context, tokens, window=window if by_layer else 0)
        except UnsupportedKV as exc:
            raise Unusable(f"{exc}; or pass --no-pruning") from exc
        for strategy in strategies:
            try:
                found[strategy].append(once(model, passage, spec, strategy))
            except ValueError as exc:
                raise Unusable(f"{text.name}: {exc}; leave that plan out") from exc
    kinds = tuple(text.kind for text in texts)
    return [
        Result(
            one,
            plan_of(one.plan, spec),
            canonical(by_layer[one]) if one in by_layer else None,
            8 * spec.itemsize,
            tuple(found[one]),
            kinds,
        )
        for one in strategies
    ]


def once(model: Any, passage: Passage, spec: KVSpec, strategy: Strategy) -> Once:
    """Do to one text what a strategy does, and read on."""
    if not strategy.pruning:
        given, bits = stored(passage.kv, spec, strategy.plan)
        return Once((1.0,) * spec.layers, bits, loss(model, passage, given))
    left = pruned(passage.kv, passage.evidence, strategy, model)
    given, bits = stored_heads(left.kv, left.held, spec, strategy.plan)
    context = passage.kv[0][0].shape[0]
    keep = tuple(fmean(counts) / context for counts in left.held)
    return Once(keep, bits, loss(model, passage, given, left))


def plan_of(text: str, spec: KVSpec) -> str:
    """A plan's canonical text for a model, by age or not."""
    plan = plans.parse_plan(text)
    if isinstance(plan, plans.ByAge):
        return f"recent:{plan.recent}({plans.canonical(plans.resolve(plan.old, spec))})"
    return plans.canonical(plans.resolve(plan, spec))
