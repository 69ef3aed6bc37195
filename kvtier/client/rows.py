"""Rows: an engine's pages as bytes, by the names that the engine gives them.

    engine's memory                  a row
    piece 0: | r0 | r1 | r2 | ..     one piece of each, one after the other, as they are
    piece 1: | r0 | r1 | r2 | ..

Engines that already hash their pages (SGLang's HiCache, vLLM's offloading) bring names that stand for everything a page
depends on. A row's key is made of that name and of the keyspace's root (`docs/keys.md`); what is inside is opaque, so
the plan is raw, and everything that decides how the bytes are meant belongs into the keyspace's `layout`.

To the cache a row is a block of an MLA model: a piece is a layer, and its bytes are latents of 16-bit elements. So
matches, leases, staging, checks and saves are those of every other block. Only a row's place in its sequence is not
known to who asks for it, so its header says 0; which row comes before it is learnt from the order of a save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.block import address
from kvtier.client.cache import Cache
from kvtier.client.hit import Hit
from kvtier.client.save import Saved
from kvtier.client.scope import Chain
from kvtier.codecs.registry import codec_for
from kvtier.codecs.view import KVView
from kvtier.errors import ConfigError, UsageError
from kvtier.spec import KVSpec

MOST_PIECES = 8192
RUNS = 8
"""Runs of rows that one load looks for: behind so many holes nothing is looked for any more."""
CALLS = 0.5
"""Seconds that the calls of a load may take besides what it waits for, before no further run is looked for."""
LATE = "match_DeadlineExceeded", "save_DeadlineExceeded"
PAUSE = 5.0
"""Seconds for which a host that did not answer in time is not asked: engines look up one request after the other."""


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Where an engine keeps rows.

    Attributes:
        pieces: int64, address of each piece of row 0.
        strides: int64, for each piece bytes from one row to the next.
        piece_nbytes: bytes of one piece.
        count: rows.
        owner: what keeps the memory alive.
    """

    pieces: NDArray[np.int64]
    strides: NDArray[np.int64]
    piece_nbytes: int
    count: int
    owner: Any

    @classmethod
    def of(cls, rows: Any) -> RowMemory:
        """Memory that has whole rows one after the other: u8 `[rows, bytes]`, each row contiguous, or a buffer."""
        array = np.asarray(rows)
        if array.ndim != 2 or array.dtype != np.uint8 or array.strides[1] != 1:
            raise UsageError(f"rows are {array.dtype} {list(array.shape)}; pass bytes, [rows, bytes of one row]")
        first = np.array([array.__array_interface__["data"][0]], np.int64)
        return cls(first, np.array([array.strides[0]], np.int64), array.shape[1], len(array), array)

    @classmethod
    def scattered(
        cls, addresses: Sequence[int], nbytes: Sequence[int], strides: Sequence[int], count: int, owner: Any
    ) -> RowMemory:
        """Memory in which a row lies in several pieces, of any sizes.

        Args:
            addresses: of each piece of row 0.
            nbytes: of each piece.
            strides: for each piece bytes from one row to the next.
            count: rows.
            owner: what keeps the memory alive.

        Raises:
            ConfigError: the sizes have so little in common that a row would be thousands of pieces.
        """
        each = math.gcd(*nbytes)
        if sum(nbytes) > MOST_PIECES * each:
            raise ConfigError(f"a row's pieces have {sorted(set(nbytes))} bytes: they have only {each} in common")
        pieces = [(begin + at, step) for begin, size, step in zip(addresses, nbytes, strides, strict=True)
                  for at in range(0, size, each)]  # fmt: skip
        begins, steps = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
        return cls(begins, steps, each, count, owner)

    @classmethod
    def apart(cls, addresses: Sequence[int], nbytes: int, owner: Any) -> tuple[RowMemory, NDArray[np.int64]]:
        """Rows that lie anywhere, each in one piece: memory that has a row at every byte, and which these are."""
        begins = np.array(addresses, np.int64)
        first = begins.min()
        table = begins - first
        return cls(first.reshape(1), np.ones(1, np.int64), nbytes, int(table.max()) + 1, owner), table

    def spec(self, tokens: int) -> KVSpec:
        """Of rows like these, each of which has the KV of so many tokens, as far as bytes can be told apart by token.

        Raises:
            ConfigError: a row has an odd number of bytes.
        """
        if self.piece_nbytes % 2:
            raise ConfigError(f"rows have pieces of {self.piece_nbytes} bytes; they must be even")
        step = math.gcd(self.piece_nbytes // 2, tokens)
        width = self.piece_nbytes // 2 // step
        return KVSpec(len(self.pieces), 1, width, "float16", block_tokens=step, mla=True)

    def prepare(self, tokens: int) -> KVSpec:
        """The spec, once its kernels are compiled: where no cache of them is that takes long, and no request should.

        Raises:
            ConfigError: see `spec`.
        """
        spec = self.spec(tokens)
        codec_for("raw", spec)
        return spec

    def view(self, spec: KVSpec, rows: Any) -> KVView:
        """These rows, in this order, as KV of a sequence.

        Raises:
            UsageError: a row that is not there.
        """
        table = np.ascontiguousarray(rows, np.int64).copy()
        if table.ndim != 1 or ((table < 0) | (table >= self.count)).any():
            raise UsageError(f"rows {table.tolist()[:8]}.. are not all among the {self.count} of this memory")
        strides = np.empty((len(self.pieces), 1, 4), np.int64)
        strides[:] = spec.head_dim * 2, spec.head_dim * 2, 2, 0
        strides[:, 0, 3] = self.strides
        tokens = len(table) * spec.block_tokens
        alone = len(set(table.tolist())) == len(table)
        return KVView(self.pieces[:, None], strides, tokens, spec, alone, self.owner, table, spec.block_tokens)


class Rows:
    """Rows of one keyspace. Thread-safe; never raises for the host's sake.

    A host that does not answer in time costs one call's patience, and then nothing for some seconds.

    Args:
        cache: of the host.
        spec: of the rows: `RowMemory.spec`.
        clock: monotonic seconds.
        **identity: everything else of `Cache.keyspace`; `layout` says how the bytes are meant, and begins with
            "opaque:".

    Raises:
        ConfigError: parts that do not fit together.
    """

    def __init__(
        self, cache: Cache, spec: KVSpec, *, clock: Callable[[], float] = time.monotonic, **identity: Any
    ) -> None:
        self._space, self._cache = cache.keyspace(spec, chained=False, **identity), cache
        self._clock, self._resume, self._late = clock, 0.0, self._counted()
        self.spec = spec

    def chain(self, names: Sequence[bytes]) -> Chain:
        """Rows that follow each other, by the engine's names."""
        named, rank = self._space.keyspace.named, self._space.rank
        return self._of([address(named(name), rank) for name in names])

    def match(self, chain: Chain, *, wait: float, again: bool = False) -> Hit:
        """See `Space.match`."""
        if self._paused():
            self._cache.counters["match_paused"] += 1
            chain = self._of([])
        hit = self._space.match(chain, wait=wait, again=again)
        self._paused()  # from now on, if it was late, and not from the next call on
        return hit

    def held(self, hit: Hit) -> int:
        """Rows that a hit has, or will have when it is loaded."""
        return hit.tokens // self.spec.block_tokens

    def load(self, chain: Chain, view: KVView, *, wait: float, again: bool = False) -> NDArray[np.bool_]:
        """Load rows into the engine's memory; whether each of them was there and is what was stored.

        Where rows are missing, those behind them are looked for as well, `RUNS` times at most.

        Args:
            chain: the rows.
            view: where each of them belongs: `RowMemory.view`. Those that were not there are undefined afterwards.
            wait: seconds that rows may take which must first be brought up from another tier.
            again: see `Space.match`.
        """
        loaded = np.zeros(len(chain.addresses), np.bool_)
        at, until = 0, self._clock() + wait
        for run in range(RUNS):
            left = until - self._clock()
            if at >= len(loaded) or (run and left < -CALLS):
                break
            with self.match(self._of(chain.addresses[at:]), wait=max(0.0, left), again=again) as hit:
                count = self.load_hit(hit, view, at)
            loaded[at : at + count] = True
            at += count + 1
        return loaded

    def load_hit(self, hit: Hit, view: KVView, at: int = 0) -> int:
        """Load the rows of a hit to where row `at` and following of a view belong; how many are there."""
        if not hit.tokens:
            return 0
        pages = view.pages[at:]
        here = replace(view, pages=pages, tokens=len(pages) * self.spec.block_tokens)
        count = hit.load(here) // self.spec.block_tokens
        self._paused()  # a load may wait for the host as well
        return count

    def save(self, chain: Chain, view: KVView, *, start: int = 0) -> Future[Saved]:
        """Store rows in the background; the engine's memory must not change until the future is done.

        Args:
            chain: the rows, after those that come before them in their sequence: the last of these is enough.
            view: where the rows lie, from row `start` on.
            start: how many rows of the chain come before those that are stored.
        """
        if self._paused():
            return self._space.refused("paused")
        rest = chain.addresses[start:]
        seen = set(chain.addresses[:start])
        once = [i for i, name in enumerate(rest) if not (name in seen or seen.add(name))]  # type: ignore[func-returns-value]
        if len(once) < len(rest):
            view = replace(view, pages=view.pages[once], tokens=len(once) * self.spec.block_tokens)
            chain = self._of([*chain.addresses[:start], *(rest[i] for i in once)])
        tokens = start * self.spec.block_tokens
        saving = self._space.save(chain, view, start=tokens, origin=tokens, vouched=True)
        saving.add_done_callback(lambda _: self._paused())
        return saving

    def clear(self) -> int:
        """See `Space.clear`."""
        return self._space.clear()

    def _paused(self) -> bool:
        """Whether the host was late a moment ago."""
        late = self._counted()
        if late > self._late:
            self._late, self._resume = late, self._clock() + PAUSE
        return self._clock() < self._resume

    def _counted(self) -> int:
        return sum(self._cache.counters[reason] for reason in LATE)

    def _of(self, addresses: Sequence[bytes]) -> Chain:
        space = self._space
        return Chain(len(addresses) * self.spec.block_tokens, addresses, space.keyspace.root, space.rank)
