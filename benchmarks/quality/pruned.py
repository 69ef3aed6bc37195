"""KV that lost tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.quality.presets import policies
from benchmarks.quality.stored import KV
from benchmarks.quality.strategies import Strategy
from kvtier.pruning import Evidence, Kept, Policy, Pruner, Ratio, Recency, Rope
from kvtier.pruning.kept import every


@dataclass(frozen=True, slots=True)
class Witness:
    """A scorer that prefers nothing and keeps what it is shown: evidence that every policy can be asked with.

    Attributes:
        window: of how many last tokens the queries are kept.
        seen: the evidence, layer by layer.
    """

    window: int = 32
    seen: list[Evidence] = field(default_factory=list)
    weights = False
    comparable = True
    accumulates = True

    def score(self, evidence: Evidence) -> torch.Tensor:
        self.seen.append(evidence)
        return evidence.positions.double()


def witness(layers: int, window: int) -> Pruner:
    """A pruner that observes what any policy with windows up to this looks at, and drops nothing."""
    return Pruner(Policy(Witness(window), Ratio(1.0), recent=window, whole=0), layers)


def evidence(pruner: Pruner, cache: Any) -> list[Evidence]:
    """What a `witness` saw, layer by layer, of a cache that holds one sequence."""
    scorer: Any = pruner.policy.scorer
    pruner.choose([(layer.keys[0], layer.values[0]) for layer in cache.layers])
    return list(scorer.seen)


@dataclass(frozen=True, slots=True)
class Decided(Policy):
    """A policy that was asked before."""

    kept: Sequence[Kept] = ()

    def choose(self, evidence: Evidence, *, layer: int, layers: int) -> Kept:
        return self.kept[layer]


@dataclass(frozen=True)
class Left:
    """What is left of a context.

    Attributes:
        kv: aligned at the end where heads hold different numbers of tokens.
        held: tokens of each KV head of each layer.
        pruner: knows what each layer holds; what reads on is to be `watched` by it.
        begin: position of the next token.
        policy: canonical text of what was dropped.
    """

    kv: KV
    held: list[list[int]]
    pruner: Pruner
    begin: int
    policy: str


def pruned(kv: KV, known: Sequence[Evidence], strategy: Strategy, model: Any) -> Left:
    """Drop what a strategy drops from a context's exact KV.

    Raises:
        ConfigError, UnsupportedKV: the model's keys cannot be turned to other positions.
    """
    by_layer = policies(str(strategy.pruning), len(kv))
    kept = [
        every(its.positions) if policy is None else policy.choose(its, layer=layer, layers=len(kv))
        for layer, (policy, its) in enumerate(zip(by_layer, known, strict=True))
    ]
    compact = any(policy is not None and policy.compact for policy in by_layer)
    pruner = Pruner(
        Decided(Recency(), Ratio(1.0), compact=compact, kept=kept), len(kv), rope=Rope.of(model) if compact else None
    )
    parts = pruner.prune([(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in kv])
    left = [(keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()) for keys, values in parts]
    begin = max(keys.shape[0] for keys, _ in left) if strategy.unrotated else pruner.next_position
    return Left(left, [layer.counts for layer in kept], pruner, begin, canonical(by_layer))


def canonical(by_layer: Sequence[Policy | None]) -> str:
    """One text for the policies of all layers, as `layers(...)` of plans is one."""
    runs: list[tuple[int, int, str]] = []
    for layer, policy in enumerate(by_layer):
        text = "none" if policy is None else str(policy)
        first = runs.pop()[0] if runs and runs[-1][2] == text else layer
        runs.append((first, layer, text))
    if len(runs) == 1:
        return runs[0][2]
    return f"layers({';'.join(f'{first}-{last}:{text}' for first, last, text in runs)})"
