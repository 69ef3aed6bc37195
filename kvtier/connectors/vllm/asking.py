"""Which requests are looked up, and what becomes of the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import wait as wait_for

from kvtier.connectors.vllm.extra import extras
from kvtier.connectors.vllm.lookup import Found, Lookups, Prompt
from kvtier.connectors.vllm.sequence import Sequence
from kvtier.connectors.vllm.stored import Stored

STEP_WAIT = 0.002
"""Seconds that one step of the engine waits, in all, for lookups that began with it."""
LOOKUP = 1.5
"""Seconds, besides what it may wait for blocks, after which a lookup is a miss."""
KEPT = 10.0
"""Seconds after which what was found, and not used, is looked up anew: a request that waits long keeps no leases."""
EXPIRING = 1.0
"""Seconds between two looks at what was found too long ago."""
EARLY = 16
"""Requests that are looked up before the scheduler asks for them."""
AHEAD = 64
"""Waiting requests that are looked up, or have leases, at a time: those that the engine asks about first."""


class Asking:
    """Lookups of the requests that wait, the engine's next ones first. Used in the scheduler's thread only.

    Args:
        stored: how the engine's layers lie in blocks.
        lookups: run on threads of their own.
        counters: what happened, by name.
        wait: seconds that a lookup may wait for blocks on their way up.
        clock: monotonic seconds.
    """

    def __init__(
        self, stored: Stored, lookups: Lookups, counters: Counter[str], wait: float, clock: Callable[[], float]
    ) -> None:
        self._stored, self._lookups, self._counters, self._clock = stored, lookups, counters, clock
        self._patience = wait + LOOKUP
        self._looked: dict[str, Sequence] = {}
        self._left = STEP_WAIT
        self._turn = 0
        self._expiring = 0.0

    def early(self, sequence: Sequence) -> None:
        """Look a request up before the engine asks about it, if not many are."""
        if not sequence.request.skip_reading_prefix_cache and self._ahead() < EARLY:
            self._ask(sequence)

    def answer(self, sequence: Sequence) -> Found | None:
        """What was found of a request; None while that is not known."""
        self.expire(sequence)
        sequence.turn = self._turn
        return sequence.found or self._answer(sequence)

    def step(self, number: int, sequences: Iterable[Sequence]) -> None:
        """A step of the engine begins, which may wait anew."""
        self._left, self._turn = STEP_WAIT, number
        if self._clock() > self._expiring:
            self._expiring = self._clock() + EXPIRING
            for each in sequences:
                self.expire(each)

    def forget(self, name: str) -> None:
        """A request has ended."""
        self._looked.pop(name, None)

    def expire(self, sequence: Sequence) -> None:
        """Give back what was found long ago, and was not used: also for whoever is not asked about."""
        lookup, found = sequence.lookup, sequence.found
        if found is None and lookup is not None and lookup.done():
            found = lookup.result()
        if found is not None and not sequence.loading and self._clock() - found.at > KEPT:
            sequence.let_go()

    def _ask(self, sequence: Sequence) -> None:
        request, tokens = sequence.request, list(sequence.request.all_token_ids)
        extra = extras(request, self._stored.block_tokens, len(tokens) // self._stored.block_tokens)
        sequence.asked = self._clock()
        self._looked[request.request_id] = sequence
        sequence.lookup = self._lookups.begin(Prompt(tokens, extra, sequence.lora))

    def _ahead(self) -> int:
        """How many that wait are looked up, or have leases."""
        looked = self._looked.items()
        self._looked = {name: each for name, each in looked if each.keeps and not each.loading}
        return len(self._looked)

    def _room_ahead(self) -> bool:
        """Whether one more may be looked up, in place of one that the engine asks about later, perhaps."""
        if self._ahead() < AHEAD:
            return True
        later = next((each for each in self._looked.values() if each.turn != self._turn), None)
        if later is not None:
            later.let_go()
        return later is not None

    def _answer(self, sequence: Sequence) -> Found | None:
        if sequence.lookup is None:
            if not self._room_ahead():
                return None
            self._ask(sequence)
        lookup = sequence.lookup
        if lookup is not None and not lookup.done() and self._left > 0:
            began = self._clock()
            wait_for((lookup,), timeout=self._left)
            self._left -= self._clock() - began
        if lookup is not None and lookup.done():
            found = lookup.result()
            sequence.take(found, self._stored.block_tokens)
            self._count(found, sequence.request.num_tokens)
        elif self._clock() - sequence.asked > self._patience:
            sequence.let_go()
            found = Found(None, at=self._clock(), why="late")
            sequence.take(found, self._stored.block_tokens)
            self._count(found, sequence.request.num_tokens)
        return sequence.found

    def _count(self, found: Found, tokens: int) -> None:
        if found.why:
            self._counters[f"missed:{found.why}"] += 1
            return
        self._counters["lookups"] += 1
        self._counters["asked_tokens"] += tokens
        self._counters["found_tokens"] += found.tokens
