"""A leased prefix."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.block import PAGE
from kvtier.client.reading import Bodies, Target, heads, on_host, target_of
from kvtier.client.scope import Chain, Scope, block_of
from kvtier.errors import ClosedError, SessionError, UsageError
from kvtier.hierarchy.answers import Matched
from kvtier.memory.device import DeviceMemory
from kvtier.tiers.base import TierNumber

CHECKSUM_WORD = slice(32, 40)
"""Where a header has the checksum of the body."""


@dataclass(frozen=True, slots=True)
class MappedArena:
    """What a hit reads: the arena as it was mapped when it was matched, and what was attached of the GPU tier then.

    Attributes:
        epoch: of the session.
        memory: u8, read-only.
        generations: u32 for each page, live.
        device: the GPU tier's memory; None for nothing.
    """

    epoch: int
    memory: NDArray[np.uint8]
    generations: NDArray[np.uint32]
    device: DeviceMemory | None = None

    @property
    def device_epoch(self) -> int:
        """Of the GPU tier's memory that can be read; 0 for none."""
        return self.device.epoch if self.device is not None and self.device.current else 0


class Hit:
    """The longest stored prefix of a sequence, pinned until `close`; made by `Space.match`.

    Attributes:
        tokens: tokens that can be loaded; those that are still on their way into the arena, `load` waits for.
        staging: further tokens that are on their way and that nobody waits for.
        problem: why the host gave no answer, the name of an error; empty when it did.
    """

    def __init__(
        self,
        scope: Scope,
        chain: Chain,
        matched: Matched,
        arena: MappedArena,
        wait: float,
        *,
        again: bool = False,
        problem: str = "",
    ) -> None:
        step = scope.keyspace.spec.block_tokens
        self._scope, self._chain, self._matched, self._arena = scope, chain, matched, arena
        self._slots, self._tiers, self._inside = matched.slots, matched.tiers, matched.inside
        self._awaited = matched.staging if wait > 0 else 0
        self._until = time.monotonic() + wait
        self._again, self.problem = again, problem
        self._closed = False
        self._seconds, self._read, self._begin = 0.0, 0, 0
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
        """Up to which token every layer is loaded and verified, by the last `load` of each; 0 until all were loaded.

        Who loaded from an `origin` on answers for what lies before it.
        """
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
        """Tokens by the tier that served them, as far as they are there; from the last load's `origin` on."""
        numbers, counts = np.unique(self._tiers[self._begin :], return_counts=True)
        step = self._scope.keyspace.spec.block_tokens
        return {TierNumber(int(n)).name.lower(): int(c) * step for n, c in zip(numbers, counts, strict=True)}

    @property
    def served(self) -> NDArray[np.uint8]:
        """For each block that is there the number of the tier that served it."""
        return self._tiers

    def gather(self) -> int:
        """Wait, as long as this hit may, for what is on its way, without loading; how many tokens are leased then."""
        while self._more():
            pass
        self._slots, self._inside = self._matched.slots, self._matched.inside
        self._tiers = self._tiers[: len(self._slots)]
        self.tokens = len(self._slots) * self._scope.keyspace.spec.block_tokens
        return self.tokens

    def close(self) -> None:
        """Give the lease back; idempotent."""
        if not self._closed:
            self._closed = True
            whole = len(self._slots) * len(self._loaded)
            self._release(self._seconds, self._read / whole if whole else 1.0)

    def load(self, kv: Any, *, layers: range | None = None, verify: bool = False, origin: int = 0) -> int:
        """Decode the leased blocks into the caller's tensors, from token `origin` of the sequence on.

        Args:
            kv: where to: one tensor `[layers, 2, tokens, kv_heads, head_dim]`, or one (k, v) pair a layer,
                `[tokens, kv_heads, head_dim]` of any strides (MLA: one latent a layer); in CPU memory or on a GPU
                (with the `gpu` extra). When it has room for fewer tokens than were leased, only whole blocks that fit
                are loaded. Its token 0 is the sequence's token `origin`. A view (`KVView`, `DeviceView`) is taken as
                it is.
            layers: only these layers; all of them unless given. `verified` counts what was loaded of every layer.
            verify: check the checksum of every block first.
            origin: tokens that the caller has, and answers for; whole blocks. They are neither fetched nor checked.

        Returns:
            Up to which token of the sequence all is verified, a multiple of the block size: `origin` when nothing was.
            `kv` beyond is undefined.

        Raises:
            KVMismatch: `kv` is not of the keyspace's spec, or read-only, or nothing here can decode into it.
            ConfigError: the plan cannot be decoded on a GPU (see `GpuCodec`), and `kv` is there.
            UsageError: `origin` is not where a block of the sequence begins, or ends.
            ClosedError: the hit is closed.
        """
        if self._closed:
            raise ClosedError("this hit is closed; load inside its `with` block")
        began = time.perf_counter()
        spec = self._scope.keyspace.spec
        begin = self._begin = block_of(origin, "origin", self._chain.tokens, spec.block_tokens)
        origin = begin * spec.block_tokens
        target = target_of(kv, self._scope.codec, self._scope.threads, origin)
        wanted = range(spec.layers) if layers is None else layers
        if not isinstance(wanted, range):
            raise UsageError(f"layers is {layers!r}; pass a range, such as range(0, 4)")
        self._loaded[wanted.start : wanted.stop] = 0
        good, room = begin, min(origin + target.tokens, self.tokens) // spec.block_tokens
        while True:
            end = min(len(self._slots), room)
            there = good + (self._scope.session.fetch(self._matched.lease, good, end) if good < end else 0)
            before, good = good, self._copy(target, wanted, good, there, verify=verify)
            self._seconds += time.perf_counter() - began
            if good < there or good >= room or (before == good < end) or (good >= end and not self._more()):
                break
            began = time.perf_counter()
        self._loaded[wanted.start : wanted.stop] = good * spec.block_tokens
        self._read += (good - begin) * len(range(spec.layers)[wanted.start : wanted.stop])
        self._scope.device.meet(target.device, self._matched.device)
        return good * spec.block_tokens

    def _more(self) -> bool:
        """Wait for more of what is on its way; False when none came in time."""
        session, had = self._scope.session, len(self._slots)
        wanted = self._chain.addresses[: had + self._awaited]
        wait = self._until - time.monotonic()
        if not self._awaited or wait <= 0:
            return False
        self._release()
        self._matched = Matched.nothing()
        self._awaited = 0
        epoch = self._arena.device_epoch
        try:
            found = session.match(wanted, wait, stream=True, after=had, device=epoch, again=self._again)
        except SessionError as exc:
            self._scope.counters[f"match_{type(exc).__name__}"] += 1
            return False
        if session.epoch != self._arena.epoch:
            session.release(found.lease)
            return False
        self._matched, self._slots, self._inside = found, found.slots, found.inside
        self._tiers = np.concatenate((self._tiers, found.tiers[had:]))
        self._awaited = found.staging
        return len(found.slots) > had

    def _release(self, seconds: float = 0.0, part: float = 1.0) -> None:
        if self._matched.lease and self._arena.epoch == self._scope.session.epoch:
            self._scope.session.release(self._matched.lease, seconds, part)

    def _copy(self, target: Target, layers: range, first: int, end: int, *, verify: bool) -> int:
        """Decode what is genuine of blocks `first` to `end`; how many, from block 0, were ours until the end."""
        scope = self._scope
        try:
            end = first + self._genuine(first, first + self._mapped(first, end), verify=verify)
            self._decode(target, layers, first, end)
        except UsageError:
            raise
        except RuntimeError:  # a GPU that fails, or has no memory for what is on its way
            scope.counters["device_error"] += 1
            return first
        return first + self._still_own(first, end)

    def _decode(self, target: Target, layers: range, first: int, end: int) -> None:
        for inside in (False, True):
            places = first + np.flatnonzero(self._inside[first:end] == inside)
            if places.size or not inside:
                target.decode(self._bodies(places, inside=inside), layers)

    def _memory(self, *, inside: bool) -> Any:
        device = self._arena.device
        return device.memory if inside and device is not None else self._arena.memory

    def _bodies(self, places: NDArray[np.int64], *, inside: bool) -> Bodies:
        """Of blocks that all lie in one memory."""
        headers = self._scope.headers
        offsets = self._slots["offset"][places].astype(np.int64) + headers.nbytes
        nbytes = np.where(places > 0, headers.body_nbytes(1), headers.body_nbytes(0))
        return Bodies(self._memory(inside=inside), offsets, nbytes, places)

    def _mapped(self, first: int, end: int) -> int:
        """How many of these slots can be read: all, or none.

        Between two lives of the host the arena may be smaller than the one that the slots are of.
        """
        arena = self._arena
        if arena.epoch != self._scope.session.epoch:
            return 0
        slots, inside = self._slots[first:end], self._inside[first:end]
        room = np.where(inside, arena.device.nbytes if arena.device_epoch and arena.device else 0, arena.memory.nbytes)
        return end - first if (slots["offset"] + slots["nbytes"] <= room).all() else 0

    def _genuine(self, first: int, end: int, *, verify: bool) -> int:
        """How many of these slots hold what they should; the first that does not is reported."""
        if first == end:
            return 0
        scope, addresses = self._scope, self._chain.addresses[first:end]
        found, starts = self._heads(first, end)
        good, why = scope.headers.matching(found, starts, addresses, first), "bad_header"
        if verify:
            for i in range(good):
                start, memory = (
                    int(self._slots["offset"][first + i]),
                    self._memory(inside=bool(self._inside[first + i])),
                )
                body = on_host(memory, start + scope.headers.nbytes, scope.headers.body_nbytes(first + i))
                stored = found[starts[i] : starts[i] + scope.headers.nbytes][CHECKSUM_WORD].view(np.uint64)[0]
                if xxhash.xxh3_64_intdigest(body.data) != int(stored):
                    good, why = i, "bad_checksum"
                    break
        if first + good < end and self._still_own(first, first + good + 1) > good:
            scope.session.condemn([addresses[good]], why)
            scope.counters[why] += 1
        return good

    def _heads(self, first: int, end: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Host memory that has the headers of these slots, and where each of them is."""
        nbytes, inside = self._scope.headers.nbytes, self._inside[first:end]
        offsets = self._slots["offset"][first:end].astype(np.int64)
        if not inside.any():
            return self._arena.memory, offsets
        found = np.empty((end - first, nbytes), np.uint8)
        for where in (False, True):
            here = inside == where
            found[here] = heads(self._memory(inside=where), offsets[here], nbytes)
        return found.reshape(-1), np.arange(end - first) * nbytes

    def _still_own(self, first: int, end: int) -> int:
        """How many of these slots were ours all the time: their generation has not moved on."""
        arena, slots, inside = self._arena, self._slots[first:end], self._inside[first:end]
        if arena.epoch != self._scope.session.epoch:
            return 0
        pages = (slots["offset"] // PAGE).astype(np.int64)
        same = np.zeros(len(slots), np.bool_)
        same[~inside] = arena.generations[pages[~inside]] == slots["generation"][~inside]
        if inside.any() and arena.device is not None:
            same[inside] = arena.device.generations[pages[inside]] == slots["generation"][inside]
            same[inside] &= arena.device_epoch > 0
        return _leading(same)


def _leading(good: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    return len(good) if good.all() else int(np.argmin(good))
