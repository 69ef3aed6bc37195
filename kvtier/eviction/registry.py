"""Policies by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable

from kvtier.errors import ConfigError
from kvtier.eviction.base import EvictionPolicy
from kvtier.eviction.cost import Cost
from kvtier.eviction.fifo import FIFO
from kvtier.eviction.lru import LRU
from kvtier.eviction.prefix import PrefixPolicy, Rule
from kvtier.eviction.s3fifo import S3FIFO

NAMES = ("lru", "fifo", "s3fifo", "cost")


def policy(name: str, identity: Callable[[int], Hashable] | None = None) -> EvictionPolicy:
    """Make a fresh policy, given its name.

    Args:
        name: one of `NAMES`.
        identity: what a row's block is, for policies that know blocks again which had left; asked while the block has
            its row. Without it they know them while they keep their row.

    Raises:
        ConfigError: there is no such policy.
    """
    rules: dict[str, Callable[[], Rule]] = {"lru": LRU, "fifo": FIFO, "s3fifo": lambda: S3FIFO(identity), "cost": Cost}
    if name not in rules:
        near = difflib.get_close_matches(str(name), NAMES, 1, 0)[0]
        raise ConfigError(f"no eviction policy {name!r}; did you mean {near!r}? Policies: {', '.join(NAMES)}")
    return PrefixPolicy(rules[name]())
