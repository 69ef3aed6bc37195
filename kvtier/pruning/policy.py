"""A pruning policy: a scorer, a budget, and what is never dropped."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.errors import ConfigError
from kvtier.pruning.budgets import Budget, Place
from kvtier.pruning.evidence import Evidence
from kvtier.pruning.kept import Kept, best, every
from kvtier.pruning.scorers import Scorer


@dataclass(frozen=True, slots=True)
class Policy:
    """Which tokens stay.

    Attributes:
        scorer: which tokens matter.
        budget: how many stay, the protected included.
        sinks: first tokens of the sequence that are never dropped.
        recent: last tokens that are never dropped.
        recent_share: likewise, as a share of the budget; the larger of the two counts.
        every: prune when so many tokens came since the last time.
        whole: sequences of up to so many tokens are not pruned.
        compact: positions are closed up after each pruning, and keys re-rotated to them (StreamingLLM's positions in
            the cache); else every token keeps its own. Needed only beyond the length that a model was trained for.
    """

    scorer: Scorer
    budget: Budget
    sinks: int = 4
    recent: int = 32
    recent_share: float = 0.0
    every: int = 100
    whole: int = 512
    compact: bool = False

    def __post_init__(self) -> None:
        for name, least in {"sinks": 0, "recent": 0, "every": 1, "whole": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"Policy.{name} is {value!r}; it is a number of tokens, {least} or more")
        if not 0 <= self.recent_share <= 1:
            raise ConfigError(f"Policy.recent_share is {self.recent_share}; it is a share from 0 to 1")
        if self.recent_share and not self.budget.mean(1 << 20):
            raise ConfigError(f"{self.budget} is no number of tokens; give recent= in place of recent_share=")
        if self.scorer.window > self.recent:
            raise ConfigError(
                f"{self.scorer} asks with the last {self.scorer.window} tokens, and only {self.recent} are protected; "
                f"set recent={self.scorer.window} or more"
            )
        if self.budget.by_weight and not self.scorer.weights:
            raise ConfigError(f"{self.budget} needs mean attention weights; use Mass(mean=True) or Window()")
        if self.budget.by_head and not self.scorer.comparable:
            raise ConfigError(f"{self.budget} compares KV heads, which scores of {self.scorer} do not; use Mass()")

    def __str__(self) -> str:
        """Canonical text: equal text, equal choice from equal evidence."""
        return (
            f"prune/1({self.scorer}*{self.budget},sinks:{self.sinks},recent:{self.recent}"
            f"/{float(self.recent_share)!r},every:{self.every},whole:{self.whole}"
            f",positions:{'compact' if self.compact else 'kept'})"
        )

    def recipe(self, context: bytes) -> str:
        """Text for `Keyspace.recipe` of what was pruned within this context.

        Args:
            context: digest of all tokens that the choice was made in, and of where prunings were, if there were
                several. What stays depends on all of them: no shorter prefix, and no other question, has the same.
        """
        if len(context) < 32:
            raise ConfigError(f"the context's digest has {len(context)} bytes; give the 32 of a SHA-256")
        return f"{self}@{context.hex()}"

    def youngest(self, length: int) -> int:
        """How many last tokens of a sequence are protected."""
        return max(self.recent, int(self.recent_share * self.budget.mean(length)))

    def choose(self, evidence: Evidence, *, layer: int, layers: int) -> Kept:
        """Say which tokens of a layer stay."""
        positions, length = evidence.positions, evidence.length
        if length <= self.whole:
            return every(positions)
        protected = evidence.protected(self.sinks, self.youngest(length))
        ranking = self.scorer.score(evidence).nan_to_num(nan=-torch.inf)
        # Finite, so that nothing but the protected is infinite: budgets count by that.
        limit = torch.finfo(ranking.dtype).max
        ranking = ranking.clamp(-limit, limit).masked_fill(protected, torch.inf)
        ranking = ranking.masked_fill(~evidence.held, -torch.inf)
        safe, there = protected.sum(1), evidence.held.sum(1)
        counts = self.budget.counts(ranking, Place(layer, layers, length, int(safe.max())))
        return best(ranking, counts.maximum(safe.clamp(min=1)).minimum(there), positions)
