"""One keyspace of a host's cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from kvtier.block import SPACE_NBYTES, address
from kvtier.client.description import Description
from kvtier.client.hit import Hit, MappedArena
from kvtier.client.save import Saved, SaveJob, Saver, refuse
from kvtier.client.scope import Chain, Scope, block_of, is_lifetime, whole
from kvtier.client.writing import source_of
from kvtier.errors import ConfigError, SessionError, UsageError
from kvtier.hierarchy.answers import Matched, Placement
from kvtier.rpc.protocol import LONGEST_WAIT
from kvtier.tiers.base import OWN, TierNumber

T = TypeVar("T")


class Space:
    """Blocks of one keyspace; made by `Cache.keyspace`. Thread-safe."""

    def __init__(self, scope: Scope, *, rank: int, saver: Saver) -> None:
        self._scope, self._saver = scope, saver
        self.keyspace, self.rank, self.session = scope.keyspace, rank, scope.session

    @property
    def block_tokens(self) -> int:
        """Tokens in one block."""
        return self.keyspace.spec.block_tokens

    def chain(self, token_ids: Any, *, extra: Sequence[bytes] | None = None) -> Chain:
        """Hash a token sequence once, to use it in several calls.

        Args:
            token_ids: list, numpy array or torch tensor of one dimension, any integer dtype.
            extra: for each whole block what else it depends on (multimodal content digests); b"" for nothing.

        Raises:
            BadTokens: ids that are not unsigned 32-bit integers.
            UsageError: a `Chain` of another space.
        """
        if isinstance(token_ids, Chain):
            if (token_ids.root, token_ids.rank) != (self.keyspace.root, self.rank):
                raise UsageError("this chain belongs to another keyspace or rank; make one with this space's chain()")
            return token_ids
        keys = self.keyspace.chain(token_ids, extra=extra)
        return Chain(len(token_ids), [address(key, self.rank) for key in keys], self.keyspace.root, self.rank)

    def describe(self) -> Description:
        """What a router needs to name blocks of this keyspace: see `kvtier where`, and `Description.write`."""
        keyspace = self.keyspace
        named = keyspace.model, keyspace.revision, keyspace.plan, keyspace.adapter
        return Description(*named, self.rank, self.block_tokens, keyspace.root.hex())

    def match(
        self, token_ids: Any, *, wait: float = 0.0, extra: Sequence[bytes] | None = None, again: bool = False
    ) -> Hit:
        """Find and lease the longest stored prefix.

        Args:
            token_ids: as for `chain`, or a `Chain`.
            wait: seconds that `Hit.load` may wait for blocks that must first be brought up from another tier; it
                decodes those that are there meanwhile. With 0 they are not waited for: `Hit.staging` says how many
                tokens are on their way, for a later match.
            extra: as for `chain`.
            again: whether another process of the same engine (its scheduler) has matched this before. Then this one is
                neither a use of the blocks nor in the host's counters; nor are those that its `load` waits for.

        Returns:
            A context manager; the blocks stay pinned until it is left. Never raises for the host's sake: a host that
            does not answer is an empty hit, counted in `Cache.counters`.
        """
        chain, wait = self.chain(token_ids, extra=extra), _seconds(wait)
        matched, device, problem = Matched.nothing(), self._scope.device, ""
        epoch = self.session.epoch
        arena = MappedArena(epoch, np.empty(0, np.uint8), np.empty(0, np.uint32))
        try:
            while chain.addresses:
                rate = self._scope.prefill.tokens_per_second
                memory = device.memory
                reads = memory.epoch if memory is not None and memory.current else 0
                found = self.session.match(
                    chain.addresses, 0.0, prefill=rate, stream=wait > 0, device=reads, again=again
                )
                mapped = MappedArena(self.session.epoch, self.session.readable(), self.session.generations(), memory)
                if mapped.epoch == epoch:
                    matched, arena = found, mapped
                    break
                # Attached anew meanwhile: this may be an answer of either life.
                epoch = mapped.epoch
                self.session.release(found.lease)
        except SessionError as exc:
            problem = type(exc).__name__
            self._scope.counters[f"match_{problem}"] += 1
        return Hit(self._scope, chain, matched, arena, wait, again=again, problem=problem)

    def computed(self, tokens: int, seconds: float) -> None:
        """Say that the engine computed the KV of so many tokens in one go in this time.

        From then on blocks that would take longer to load than to compute are declined: they are no hit, and counted.
        The last few reports count.

        Raises:
            UsageError: a negative number, or a time that is none.
        """
        if tokens < 0 or not 0 <= seconds < math.inf:
            raise UsageError(
                f"{tokens} tokens in {seconds!r} s cannot be; pass how many were computed, and in what time"
            )
        if tokens >= self.block_tokens and seconds:
            self._scope.prefill.observe(tokens, seconds)

    def save(
        self,
        token_ids: Any,
        kv: Any,
        *,
        start: int = 0,
        origin: int = 0,
        after: Hit | None = None,
        vouched: bool = False,
        extra: Sequence[bytes] | None = None,
    ) -> Future[Saved]:
        """Store the whole blocks of a sequence, from token `start` on, in the background.

        `kv` is read after this returns: what it has of the tokens from `start` on must not change until the future is
        done. On a GPU, what is queued on the current stream now comes before that; what would change it may be queued
        when the future is done, and not earlier.

        Args:
            token_ids: as for `chain`, or a `Chain`.
            kv: KV of the sequence from its token `origin` on: one tensor `[layers, 2, tokens, kv_heads, head_dim]`, or
                one (k, v) pair a layer, `[tokens, kv_heads, head_dim]` of any strides (MLA: one latent a layer); in CPU
                memory or on a GPU (with the `gpu` extra), where it is encoded. A view (`KVView`, `DeviceView`) is taken
                as it is.
            start: tokens that are not stored with this: what `Hit.load` returned.
            origin: the sequence's token that `kv` begins with; whole blocks, at most `start`.
            after: the hit that the first `start` tokens were loaded from.
            vouched: the engine holds the KV of the first `start` tokens (whole blocks), and answers for it: it computed
                it, or loaded it as verified. Without this and `after`, `start` must be 0.
            extra: as for `chain`.

        Returns:
            A future of what became of it; it never holds an exception for the host's sake. When `start` is not what the
            hit verified, nothing is stored and it says `refused="unverified"`.

        Raises:
            KVMismatch: `kv` is not of the keyspace's spec, or ends before `token_ids`, or nothing here can encode it.
            ConfigError: the plan cannot be encoded on a GPU (see `GpuCodec`), and `kv` is there.
            UsageError: `origin`, or a `start` that is vouched for, is not where a block begins, or `origin` lies behind
                `start`.
        """
        chain = self.chain(token_ids, extra=extra)
        step = self.block_tokens
        first = block_of(origin, "origin", chain.tokens, step) * step
        source = source_of(kv, self._scope.codec, first)
        start = block_of(start, "start", chain.tokens, step) * step if vouched else whole(start, "start")
        return self._saver.submit(SaveJob(self._scope, chain, source, start, first, after, vouched))

    def refused(self, why: str) -> Future[Saved]:
        """A save that was refused before it began, counted."""
        return refuse(self._scope, why)

    def prefetch(self, token_ids: Any, *, tier: str = "cpu", extra: Sequence[bytes] | None = None) -> Future[int]:
        """Bring a sequence's blocks up to a tier ("cpu" or "gpu") in the background.

        Returns:
            A future of how many blocks are there at the end.
        """
        addresses = self.chain(token_ids, extra=extra).addresses
        number = tier_number(tier)
        asked = self._or(lambda: self.session.prefetch(addresses, number), _done(0))
        answer: Future[int] = Future()
        answer.set_running_or_notify_cancel()
        asked.add_done_callback(lambda done: answer.set_result(self._or(done.result, 0)))
        return answer

    def move(self, token_ids: Any, tier: str, *, wait: float = 30.0, extra: Sequence[bytes] | None = None) -> int:
        """Move a sequence's blocks to a tier and out of the other memory tiers.

        Returns:
            How many blocks are there at the end.
        """
        addresses = self.chain(token_ids, extra=extra).addresses
        number, wait = tier_number(tier), _seconds(wait)
        return self._or(lambda: self.session.move(addresses, number, wait), 0)

    def pin(self, token_ids: Any, *, ttl: float, extra: Sequence[bytes] | None = None) -> int:
        """Bring the stored blocks of a sequence to the CPU tier and keep them there for `ttl` seconds, 30 days at most.

        Pins of all clients together may take a part of the tier (`cpu.pinned`); beyond that fewer are kept. They
        outlive this client, but not the host's CPU tier.

        Returns:
            How many blocks are kept, from the first on.
        """
        if not is_lifetime(ttl):
            raise UsageError(f"ttl is {ttl!r}; pass seconds above 0, a billion at most")
        addresses = self.chain(token_ids, extra=extra).addresses
        return self._or(lambda: self.session.pin(addresses, float(ttl)), 0)

    def unpin(self, token_ids: Any, *, extra: Sequence[bytes] | None = None) -> int:
        """Let the blocks of a sequence go, whoever pinned them; how many were pinned."""
        addresses = self.chain(token_ids, extra=extra).addresses
        return self._or(lambda: self.session.unpin(addresses), 0)

    def evict(self, token_ids: Any, *, start: int = 0, extra: Sequence[bytes] | None = None) -> int:
        """Drop the blocks of a sequence from every tier of the host for good, pinned ones too.

        What other sequences share with it goes as well. Nobody finds blocks behind a dropped one until that is saved
        again.

        Args:
            token_ids: as for `chain`, or a `Chain`.
            start: blocks that begin before this token stay.
            extra: as for `chain`.

        Returns:
            How many blocks there were.

        Raises:
            SessionError: the host did not answer, so they may be there still: a deletion must not fail silently.
        """
        addresses = self.chain(token_ids, extra=extra).addresses[max(0, -(-start // self.block_tokens)) :]
        return self.session.evict(addresses)

    def clear(self) -> int:
        """Drop all blocks of this keyspace, of all ranks, from every tier of the host for good; how many there were.

        What is being saved meanwhile may stay.

        Raises:
            SessionError: the host did not answer, so they may be there still.
        """
        return self.session.clear(self.keyspace.root[:SPACE_NBYTES])

    def inspect(self, token_ids: Any, *, extra: Sequence[bytes] | None = None) -> list[dict[str, Any] | None]:
        """For each whole block what the host knows of it, or None.

        Returns:
            Dictionaries with `tiers` (names), `nbytes`, `codec`, `created` and `last_access` (seconds since the epoch),
            `hits`, `leased`.
        """
        addresses = self.chain(token_ids, extra=extra).addresses
        return self._or(lambda: self.session.inspect(addresses), [None] * len(addresses))

    def where(self, token_ids: Any, *, extra: Sequence[bytes] | None = None) -> list[dict[str, Any]]:
        """Which hosts hold how much of a sequence, the longest prefix first, so that a router can choose.

        Nothing is leased, moved or counted. Of a block that more than 8 hosts hold, the last 8 that came to hold it are
        known.

        Returns:
            For each host that has something of it a dictionary with `host` (its name), `here` (whether it is this one),
            `blocks`, `tokens`, and `tiers` (how many of the blocks are in which tier, by the tier's name). When the
            index does not answer only this host is in it, counted as `where_index`.
        """
        addresses = self.chain(token_ids, extra=extra).addresses
        placement = self._or(lambda: self.session.where(addresses), Placement(()))
        if not placement.complete:
            self._scope.counters["where_index"] += 1
        return [
            {
                "host": place.host,
                "here": place.here,
                "blocks": place.blocks,
                "tokens": place.blocks * self.block_tokens,
                "tiers": place.tiers,
            }
            for place in placement.places
        ]

    def _or(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except SessionError as exc:
            self._scope.counters[f"call_{type(exc).__name__}"] += 1
            return otherwise


def tier_number(name: str) -> TierNumber:
    """The number of the tier of this name.

    Raises:
        ConfigError: there is no such tier.
    """
    known = {tier.name.lower(): tier for tier in OWN}
    try:
        return known[name.lower()]
    except KeyError:
        raise ConfigError(f"no tier {name!r}; use one of {', '.join(known)}") from None


def _seconds(wait: float) -> float:
    """What a caller is willing to wait, within what a deadline can say."""
    try:
        seconds = float(wait)
    except (TypeError, ValueError):
        seconds = math.nan
    if math.isnan(seconds):
        raise UsageError(f"wait is {wait!r}; pass seconds, 0 for not at all")
    return min(max(0.0, seconds), LONGEST_WAIT)


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
