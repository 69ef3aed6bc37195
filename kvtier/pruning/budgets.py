"""How many tokens stay, by layer and KV head, the protected included.

Shares are of the whole sequence, dropped tokens included: a cache that is pruned again and again keeps its share, and
does not shrink to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from kvtier.errors import ConfigError


class Place(NamedTuple):
    """Where is asked.

    Attributes:
        layer: its number.
        layers: of the model.
        length: tokens of the sequence, those included that were dropped.
        protected: tokens that stay in any case, of a KV head.
    """

    layer: int
    layers: int
    length: int
    protected: int


class Budget(Protocol):
    """Says how many tokens stay. `str()` of it is its canonical text."""

    @property
    def by_weight(self) -> bool:
        """It needs scores that are mean attention weights."""
        ...

    @property
    def by_head(self) -> bool:
        """It compares the scores of KV heads."""
        ...

    def mean(self, length: int) -> int:
        """How many tokens of a sequence a KV head keeps, in the mean over layers; 0 when only scores say."""
        ...

    def counts(self, scores: torch.Tensor, place: Place) -> torch.Tensor:
        """Say how many tokens each KV head keeps, `[kv_heads]`, int64.

        Args:
            scores: `[kv_heads, tokens]`; infinite where a token is protected, -infinite where there is none.
            place: where.
        """
        ...


@dataclass(frozen=True, slots=True)
class Length:
    """So many tokens for every head of every layer."""

    tokens: int
    by_weight = False
    by_head = False

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"Length.tokens is {self.tokens}; a head keeps 1 token or more")

    def mean(self, length: int) -> int:
        return min(self.tokens, length)

    def counts(self, scores: torch.Tensor, place: Place) -> torch.Tensor:
        return _all(scores, self.mean(place.length))

    def __str__(self) -> str:
        return f"length:{self.tokens}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """This share of the sequence for every head of every layer."""

    keep: float
    by_weight = False
    by_head = False

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"Ratio.keep is {self.keep}; it is a share above 0, up to 1")

    def mean(self, length: int) -> int:
        return max(1, round(self.keep * length))

    def counts(self, scores: torch.Tensor, place: Place) -> torch.Tensor:
        return _all(scores, self.mean(place.length))

    def __str__(self) -> str:
        return f"ratio:{float(self.keep)!r}"


@dataclass(frozen=True, slots=True)
class Threshold:
    """Whatever receives at least this mean attention weight. How much that is, only the sequence says.

    A mean weight is one over the number of tokens in the mean: what is little in a short text is much in a long one.
    """

    weight: float
    by_weight = True
    by_head = False

    def __post_init__(self) -> None:
        if not 0 < self.weight < 1:
            raise ConfigError(f"Threshold.weight is {self.weight}; attention weights are between 0 and 1")

    def mean(self, length: int) -> int:
        return 0

    def counts(self, scores: torch.Tensor, place: Place) -> torch.Tensor:
        return (scores >= self.weight).sum(1)

    def __str__(self) -> str:
        return f"threshold:{float(self.weight)!r}"


@dataclass(frozen=True, slots=True)
class Pyramid:
    """More in the lower layers, less in the upper ones, an arithmetic sequence: PyramidKV (arXiv 2406.02069).

    Beyond the protected tokens a head has `each` in the mean, the top layer each/beta, the bottom layer 2 each less
    that. Where the bottom layer would have more than there is, it has what there is, and the top layer the rest. The
    sum over layers is that of `budget`, to the token: the authors' code rounds the step down and keeps a little more,
    and goes uniform for sequences of fewer than 2 each tokens.
    """

    budget: Length | Ratio
    beta: int = 20
    by_weight = False
    by_head = False

    def __post_init__(self) -> None:
        if type(self.beta) is not int or self.beta < 1:
            raise ConfigError(
                f"Pyramid.beta is {self.beta}; the top layer has 1/beta of the mean, beta is a whole number, 1 or more"
            )

    def mean(self, length: int) -> int:
        return self.budget.mean(length)

    def counts(self, scores: torch.Tensor, place: Place) -> torch.Tensor:
        each = self.mean(place.length) - place.protected
        if each <= 0 or self.mean(place.length) >= place.length:
            return _all(scores, self.mean(place.length))
        top = each // self.beta
        bottom = min(2 * each - top, place.length - place.protected)
        return _all(scores, place.protected + staircase(bottom, 2 * each - bottom, place.layers)[place.layer])

    def __str__(self) -> str:
        return f"pyramid:{self.beta}({self.budget})"


@dataclass(frozen=True, slots=True)
class ByHead:
    """A layer's tokens shared out among its KV heads by their scores: Ada-KV (arXiv 2407.11550).

    Attributes:
        budget: what the layer has: so many for a head, in the mean.
        floor: the share of that, beyond the protected tokens, which every head has in any case.
    """

    budget: Length | Ratio | Pyramid
    floor: float = 0.2
    by_weight = False
    by_head = True

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"ByHead.floor is {self.floor}; it is a share from 0 to 1")

    def mean(self, length: int) -> int:
        return self.budget.mean(length)

    def counts(self, scores: torch.Tensor, place: Place) -> torch.Tensor:
        heads, tokens = scores.shape
        each = int(self.budget.counts(scores, place)[0])
        safe = (scores == torch.inf).sum(1)
        spare = (each - safe).clamp(min=0)
        safe = safe + (self.floor * spare).long()
        ranked = scores.sort(dim=1, descending=True, stable=True).values
        held = ranked > -torch.inf
        ranked.masked_fill_(held & (torch.arange(tokens, device=scores.device) < safe[:, None]), torch.inf)
        there = int(held.sum())
        best = ranked.flatten().sort(descending=True, stable=True).indices[: min(heads * each, there)]
        return torch.bincount(best // tokens, minlength=heads)

    def __str__(self) -> str:
        return f"byhead:{float(self.floor)!r}({self.budget})"


def staircase(bottom: int, top: int, layers: int) -> list[int]:
    """Fall evenly from `bottom` to `top`; whole numbers that never rise and sum to layers * (bottom + top) / 2."""
    if layers == 1:
        return [(bottom + top) // 2]
    exact = [divmod(bottom * (layers - 1) - (bottom - top) * layer, layers - 1) for layer in range(layers)]
    steps = [whole for whole, _ in exact]
    short = layers * (bottom + top) // 2 - sum(steps)
    # Who lost most by rounding down gets one more: of two with the same whole number that is the lower layer.
    for layer in sorted(range(layers), key=lambda layer: -exact[layer][1])[:short]:
        steps[layer] += 1
    return steps


def _all(scores: torch.Tensor, count: int) -> torch.Tensor:
    return torch.full((scores.shape[0],), count, dtype=torch.int64, device=scores.device)
