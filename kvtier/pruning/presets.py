"""The policies of the papers.

`keep` is a share of the sequence (a float) or a number of tokens (an int); whatever else a `Policy` has can be given.
"""

from __future__ import annotations

from typing import Any

from kvtier.errors import ConfigError
from kvtier.pruning.budgets import Length, Pyramid, Ratio, Threshold
from kvtier.pruning.policy import Policy
from kvtier.pruning.scorers import Mass, Recency, Window

KEEP = 0.7
"""Share that is kept unless said otherwise."""


def h2o(keep: float = KEEP, **rest: Any) -> Policy:
    """Heavy hitters and as many recent tokens (arXiv 2306.14048)."""
    return Policy(Mass(), budget(keep), **{"sinks": 0, "recent": 0, "recent_share": 0.5} | rest)


def streaming_llm(sinks: int = 4, recent: int = 512, **rest: Any) -> Policy:
    """The first tokens and the last (arXiv 2309.17453). `compact=True` gives the paper's positions in the cache."""
    return Policy(Recency(), Length(sinks + recent), sinks=sinks, recent=recent, **{"whole": 0} | rest)


def snap_kv(keep: float = KEEP, *, window: int = 32, kernel: int = 7, **rest: Any) -> Policy:
    """What the last tokens look at, and its neighbours (arXiv 2404.14469)."""
    return Policy(Window(window, kernel), _more_than(window, keep), **{"sinks": 0, "recent": window} | rest)


def pyramid_kv(keep: float = KEEP, *, beta: int = 20, window: int = 32, kernel: int = 7, **rest: Any) -> Policy:
    """SnapKV with more tokens in the lower layers than in the upper (arXiv 2406.02069)."""
    return Policy(
        Window(window, kernel), Pyramid(_more_than(window, keep), beta), **{"sinks": 0, "recent": window} | rest
    )


def attention_threshold(weight: float = 0.001, **rest: Any) -> Policy:
    """Whatever receives this mean attention weight from the queries that could see it."""
    return Policy(Mass(mean=True), Threshold(weight), **rest)


def _more_than(window: int, keep: float) -> Length | Ratio:
    """A budget that is not used up by the window: of a window alone, without first tokens, nothing sensible follows."""
    if isinstance(keep, int) and keep <= window:
        raise ConfigError(f"keep={keep} leaves nothing but the window of {window} tokens; keep more, or a share as 0.5")
    return budget(keep)


def budget(keep: float) -> Length | Ratio:
    """A share of the sequence (a float) or a number of tokens (an int) for every head."""
    return Length(keep) if isinstance(keep, int) else Ratio(keep)
