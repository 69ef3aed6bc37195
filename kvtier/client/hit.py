"""A leased prefix."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.block import PAGE
from kvtier.client.scope import Chain, Scope
from kvtier.codecs.view import KVView
from kvtier.errors import ClosedError, SessionError, UsageError
from kvtier.hierarchy.answers import Matched
from kvtier.tiers.base import TierNumber

CHECKSUM_WORD = slice(32, 40)
"""Where a header has the checksum of the body."""


@dataclass(frozen=True, slots=True)
class MappedArena:
    """What a hit reads: the arena as it was mapped when it was matched.

    Attributes:
        epoch: of the session.
        memory: u8, read-only.
        generations: u32 for each page, live.
    """

    epoch: int
    memory: NDArray[np.uint8]
    generations: NDArray[np.uint32]


class Hit:
    """The longest stored prefix of a sequence, pinned until `close`; made by `Space.match`.

    Attributes:
        tokens: tokens that can be loaded; those that are still on their way into the arena, `load` waits for.
        staging: further tokens that are on their way and that nobody waits for.
    """

    def __init__(self, scope: Scope, chain: Chain, matched: Matched, arena: MappedArena, wait: float) -> None:
        step = scope.keyspace.spec.block_tokens
        self._scope, self._chain, self._matched, self._arena = scope, chain, matched, arena
        self._slots, self._tiers = matched.slots, matched.tiers
        self._awaited = matched.staging if wait > 0 else 0
        self._until = time.monotonic() + wait
        self._closed = False
        self._seconds = 0.0
        self.tokens = (len(self._slots) + self._awaited) * step
        self.staging = (matched.staging - self._awaited) * step
        self._loaded = np.zeros(scope.keyspace.spec.layers, np.int64)

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def verified(self) -> int:
        """Tokens that are loaded and verified in every layer, by the last `load` of each; 0 until all were loaded."""
        return int(self._loaded.min())

    def extends(self, chain: Chain, tokens: int) -> bool:
        """Whether this hit verified exactly the first `tokens` tokens of a sequence."""
        last = tokens // self._scope.keyspace.spec.block_tokens - 1
        # A key stands for all tokens before it, so the last one is enough.
        return tokens == self.verified and (
            not tokens or self._chain.addresses[last : last + 1] == chain.addresses[last : last + 1]
        )

    @property
    def tiers(self) -> dict[str, int]:
        """Tokens by the tier that served them, as far as they are in the arena."""
        numbers, counts = np.unique(self._tiers, return_counts=True)
        step = self._scope.keyspace.spec.block_tokens
        return {TierNumber(int(n)).name.lower(): int(c) * step for n, c in zip(numbers, counts, strict=True)}

    def close(self) -> None:
        """Give the lease back; idempotent."""
        if not self._closed:
            self._closed = True
            self._release(self._seconds)

    def load(self, kv: Any, *, layers: range | None = None, verify: bool = False) -> int:
        """Decode the leased blocks into the caller's tensors, from token 0 on.

        Args:
            kv: where to: one tensor `[layers, 2, tokens, kv_heads, head_dim]`, or one (k, v) pair a layer,
                `[tokens, kv_heads, head_dim]` of any strides (MLA: one latent a layer). When it has room for fewer
                tokens than were leased, only whole blocks that fit are loaded.
            layers: only these layers; all of them unless given. `verified` counts what was loaded of every layer.
            verify: check the checksum of every block first.

        Returns:
            How many tokens are verified, a multiple of the block size; `kv` beyond them is undefined.

        Raises:
            KVMismatch: `kv` is not of the keyspace's spec, or read-only.
            ClosedError: the hit is closed.
        """
        if self._closed:
            raise ClosedError("this hit is closed; load inside its `with` block")
        began = time.perf_counter()
        spec = self._scope.keyspace.spec
        view = KVView.of(kv, spec)
        view.require_writable()
        wanted = range(spec.layers) if layers is None else layers
        if not isinstance(wanted, range):
            raise UsageError(f"layers is {layers!r}; pass a range, such as range(0, 4)")
        self._loaded[wanted.start : wanted.stop] = 0
        good, room = 0, view.tokens // spec.block_tokens
        while True:
            good = self._copy(view, wanted, good, verify=verify)
            self._seconds += time.perf_counter() - began
            if good < len(self._slots) or good >= room or not self._more():
                break
            began = time.perf_counter()
        self._loaded[wanted.start : wanted.stop] = good * spec.block_tokens
        return good * spec.block_tokens

    def _more(self) -> bool:
        """Wait for more of what is on its way; False when none came in time."""
        session, had = self._scope.session, len(self._slots)
        wait = self._until - time.monotonic()
        if not self._awaited or wait <= 0:
            return False
        self._release()
        self._matched = Matched(0, self._slots[:0], 0, self._tiers[:0])
        self._awaited = 0
        try:
            found = session.match(self._chain.addresses, wait, stream=True, after=had)
        except SessionError as exc:
            self._scope.counters[f"match_{type(exc).__name__}"] += 1
            return False
        if session.epoch != self._arena.epoch:
            session.release(found.lease)
            return False
        self._matched, self._slots = found, found.slots
        self._tiers = np.concatenate((self._tiers, found.tiers[had:]))
        self._awaited = found.staging
        return len(found.slots) > had

    def _release(self, seconds: float = 0.0) -> None:
        if self._matched.lease and self._arena.epoch == self._scope.session.epoch:
            self._scope.session.release(self._matched.lease, seconds)

    def _copy(self, view: KVView, layers: range, first: int, *, verify: bool) -> int:
        """Decode what is genuine, from block `first` on; how many blocks, from block 0, were ours until the end."""
        scope, memory = self._scope, self._arena.memory
        slots = self._slots[first : view.tokens // scope.keyspace.spec.block_tokens]
        offsets = slots["offset"].astype(np.int64)
        # Between two lives of the host the arena may be smaller than the one that the slots are of.
        if self._arena.epoch != scope.session.epoch or (offsets + slots["nbytes"] > memory.nbytes).any():
            offsets = offsets[:0]
        good = self._genuine(memory, offsets, first, verify=verify)
        self._decode(view, memory, offsets[:good] + scope.headers.nbytes, first, layers)
        return first + self._still_own(offsets[:good], first)

    def _genuine(self, memory: NDArray[np.uint8], offsets: NDArray[np.int64], first: int, *, verify: bool) -> int:
        """How many of these slots hold what they should, from block `first` on; the first that does not is reported."""
        if not len(offsets):
            return 0
        scope, addresses = self._scope, self._chain.addresses[first:]
        good = scope.headers.matching(memory, offsets, addresses, first)
        why = "bad_header"
        if verify:
            for i in range(good):
                start = int(offsets[i]) + scope.headers.nbytes
                body = memory[start : start + scope.headers.body_nbytes(first + i)]
                stored = memory[offsets[i] : offsets[i] + scope.headers.nbytes][CHECKSUM_WORD].view(np.uint64)[0]
                if xxhash.xxh3_64_intdigest(body.data) != int(stored):
                    good, why = i, "bad_checksum"
                    break
        if good < len(offsets) and self._still_own(offsets[: good + 1], first) > good:
            scope.session.condemn([addresses[good]], why)
            scope.counters[why] += 1
        return good

    def _decode(
        self, view: KVView, memory: NDArray[np.uint8], bodies: NDArray[np.int64], first: int, layers: range
    ) -> None:
        scope = self._scope
        spec = scope.keyspace.spec
        positions = np.arange(first, first + len(bodies), dtype=np.int64)
        tokens = positions * spec.block_tokens
        parts = min(scope.threads, len(bodies))
        if parts < 2:
            scope.codec.decode(memory, bodies, positions, view, tokens, layers)
            return
        with ThreadPoolExecutor(parts) as threads:
            cuts = zip(*(np.array_split(each, parts) for each in (bodies, positions, tokens)), strict=True)
            for done in [threads.submit(scope.codec.decode, memory, b, p, view, t, layers) for b, p, t in cuts]:
                done.result()

    def _still_own(self, offsets: NDArray[np.int64], first: int) -> int:
        """How many of these slots, from block `first` on, were ours all the time: their generation has not moved on."""
        if self._arena.epoch != self._scope.session.epoch:
            return 0
        same = self._arena.generations[offsets // PAGE] == self._slots["generation"][first : first + len(offsets)]
        return len(offsets) if same.all() else int(np.argmin(same))
