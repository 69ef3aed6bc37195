"""What everything that works in one keyspace shares."""

from __future__ import annotations

import operator
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier.client.device import Device
from kvtier.client.headers import Headers
from kvtier.client.session import Session
from kvtier.codecs.base import Codec
from kvtier.errors import UsageError
from kvtier.keys import Keyspace

LONGEST_TTL = 1e9
REPORTS = 7
"""Of an engine's speed that count."""


class PrefillRate:
    """How fast an engine computes KV: the middle one of the last times that it said, so that a slip counts for nothing.

    Attributes:
        tokens_per_second: 0 while nothing was said.
    """

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        self._last: deque[float] = deque(maxlen=REPORTS)

    def observe(self, tokens: int, seconds: float) -> None:
        """So many tokens were computed in one go in this time."""
        self._last.append(tokens / seconds)
        self.tokens_per_second = statistics.median_low(self._last)


@dataclass(frozen=True, slots=True)
class Scope:
    """One keyspace on one session.

    Attributes:
        session: with the host.
        keyspace: root of the keys.
        codec: carries out its plan.
        headers: makes and checks block headers.
        counters: what went wrong on this client's side, by reason.
        threads: how many threads decode one load.
        device: the GPU tier's memory, as far as this client reads it.
        ttl: seconds after which what is saved expires; 0 for never.
        prefill: how fast the engine computes.
    """

    session: Session
    keyspace: Keyspace
    codec: Codec
    headers: Headers
    counters: Counter[str]
    threads: int
    device: Device
    ttl: float = 0.0
    prefill: PrefillRate = field(default_factory=PrefillRate)


@dataclass(frozen=True, slots=True)
class Chain:
    """The whole blocks of one token sequence, hashed.

    Attributes:
        tokens: length of the sequence; the last, partial block has no key.
        addresses: 34-byte address of each whole block, in order.
        root: of the keyspace that they belong to.
        rank: the tensor-parallel rank that they belong to.
    """

    tokens: int
    addresses: Sequence[bytes] = field(repr=False)
    root: bytes = field(repr=False)
    rank: int

    def upto(self, tokens: int, block_tokens: int) -> Chain:
        """The first tokens of it."""
        return replace(self, tokens=tokens, addresses=self.addresses[: tokens // block_tokens])


def block_of(token: Any, name: str, tokens: int, block_tokens: int) -> int:
    """Which block begins at a token of a sequence of `tokens`, or its end.

    Raises:
        UsageError: none does; `name` is what the caller calls it.
    """
    number = whole(token, name)
    if not 0 <= number <= tokens or number % block_tokens:
        raise UsageError(f"{name} is {number}; pass a multiple of {block_tokens} (block_tokens), at most {tokens}")
    return number // block_tokens


def whole(tokens: Any, name: str) -> int:
    """A number of tokens.

    Raises:
        UsageError: it is no integer; `name` is what the caller calls it.
    """
    try:
        return operator.index(tokens)
    except TypeError as exc:
        raise UsageError(f"{name} is {tokens!r}; pass a number of tokens, an integer") from exc


def is_lifetime(seconds: Any) -> bool:
    """Whether something can live for this long."""
    return isinstance(seconds, int | float) and 0 < seconds < LONGEST_TTL
