"""What everything that works in one keyspace shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvtier.client.headers import Headers
from kvtier.client.session import Session
from kvtier.codecs.base import Codec
from kvtier.keys import Keyspace


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
    """

    session: Session
    keyspace: Keyspace
    codec: Codec
    headers: Headers
    counters: Counter[str]
    threads: int


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
