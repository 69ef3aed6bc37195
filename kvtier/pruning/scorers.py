"""Which tokens matter: a scorer gives every token of a layer a number, more is better.

New ones keep to `Scorer`; what they may look at is `Evidence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch.nn import functional

from kvtier.errors import ConfigError
from kvtier.pruning.attention import window_mean
from kvtier.pruning.evidence import Evidence


class Scorer(Protocol):
    """Scores tokens. `str()` of it is its canonical text.

    Attributes:
        weights: its scores are mean attention weights, so that a threshold means something.
        comparable: scores of different KV heads can be compared.
        accumulates: it reads `Evidence.mass`.
    """

    @property
    def weights(self) -> bool: ...
    @property
    def comparable(self) -> bool: ...
    @property
    def accumulates(self) -> bool: ...
    @property
    def window(self) -> int:
        """Of how many youngest tokens it reads the queries; they must be protected."""
        ...

    def score(self, evidence: Evidence) -> torch.Tensor:
        """Score each token, `[kv_heads, tokens]`; what stands where there is no token does not matter."""
        ...


@dataclass(frozen=True, slots=True)
class Recency:
    """The younger the better. With sinks this is StreamingLLM (arXiv 2309.17453): sinks and a window."""

    weights: ClassVar[bool] = False
    comparable: ClassVar[bool] = True
    accumulates: ClassVar[bool] = False
    window: ClassVar[int] = 0

    def score(self, evidence: Evidence) -> torch.Tensor:
        # float32 would tie what stands beyond token 2^24.
        return evidence.positions.double()

    def __str__(self) -> str:
        return "recency"


@dataclass(frozen=True, slots=True)
class Mass:
    """Attention that a token received from all queries that were seen: H2O (arXiv 2306.14048).

    Accumulated from query to query, by layer and KV head; scores of what is dropped are forgotten.

    Attributes:
        mean: divide by how many queries could see the token, so that age is no merit.
    """

    mean: bool = False
    comparable: ClassVar[bool] = True
    accumulates: ClassVar[bool] = True
    window: ClassVar[int] = 0

    @property
    def weights(self) -> bool:
        return self.mean

    def score(self, evidence: Evidence) -> torch.Tensor:
        mass, seen = evidence.received()
        return mass / seen.clamp(min=1) if self.mean else mass

    def __str__(self) -> str:
        return "mass/mean" if self.mean else "mass"


@dataclass(frozen=True, slots=True)
class Window:
    """Attention from the queries of the last tokens, pooled along the tokens: SnapKV (arXiv 2404.14469).

    A neighbour of what matters is kept with it. The window itself is not pooled into what is before it.

    Attributes:
        window: how many last tokens ask.
        kernel: over how many neighbours is pooled, odd; 1 for none.
        pool: "max" as in the paper's LongBench runs, or "mean".
    """

    window: int = 32
    kernel: int = 7
    pool: Literal["max", "mean"] = "max"
    weights: ClassVar[bool] = True
    comparable: ClassVar[bool] = True
    accumulates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole = {type(self.window), type(self.kernel)} == {int}
        if not whole or self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"{self}: window is 1 or more and kernel an odd number, as in Window(32, 7)")
        if self.pool not in ("max", "mean"):
            raise ConfigError(f"Window.pool is {self.pool!r}; use 'max' or 'mean'")

    def score(self, evidence: Evidence) -> torch.Tensor:
        queries = evidence.asked()[:, -self.window :]
        means = window_mean(queries, evidence.keys, evidence.scale, evidence.held)
        before = means.shape[1] - queries.shape[1]
        if self.kernel > 1 and before:
            pool = functional.max_pool1d if self.pool == "max" else functional.avg_pool1d
            means[:, :before] = pool(means[:, :before], self.kernel, 1, self.kernel // 2)
        return means

    def __str__(self) -> str:
        return f"window:{self.window}/{self.pool}:{self.kernel}"


@dataclass(frozen=True, slots=True)
class KeyNorm:
    """Short keys are asked for most (arXiv 2406.11430). Needs no queries; worse than what looks at attention."""

    weights: ClassVar[bool] = False
    comparable: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False
    window: ClassVar[int] = 0

    def score(self, evidence: Evidence) -> torch.Tensor:
        lengths: torch.Tensor = evidence.keys.float().norm(dim=-1)
        return -lengths

    def __str__(self) -> str:
        return "keynorm"
