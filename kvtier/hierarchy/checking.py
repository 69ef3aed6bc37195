"""All that a host has, compared at once with all that the index says of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvtier.errors import SessionUnavailable
from kvtier.hierarchy.publishing import PART, differing, here, kind_of, mend, part, said_of
from kvtier.hierarchy.state import State

EXAMPLES = 8
"""Keys that are named of each kind of difference."""
TRIES, PAUSE = 5, 0.2
"""How often the index is asked when it does not answer in time, and seconds in between."""
SEEN = 1 << 16
"""Keys that are remembered, so that a sweep does not count what was counted before."""
FLUSH = 5.0
"""Seconds for what is still to be told."""

T = TypeVar("T")


class Check:
    """One comparison of all that this host has with all that the index says of it."""

    def __init__(self, state: State, *, repair: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the host, whether to mend what differs, and a monotonic clock."""
        self._state = state
        self._clock = clock
        self._repair = repair
        self._until = 0.0
        self._counts: Counter[str] = Counter(blocks=0, entries=0, missing=0, wrong=0, stale=0, dead=0, partly_dead=0)
        self._examples: dict[str, list[str]] = {}
        self._mended = 0
        self._seen: set[bytes] = set()

    def run(self, seconds: float) -> dict[str, Any]:
        """Compare, in the caller's thread, for at most so long; counts, examples, and whether it was all.

        `missing` are blocks that the index lacks, `wrong` those that it has of another tier or size, `stale` entries of
        this host's without a block, `dead` and `partly_dead` blocks of which only, or also, dead lives tell;
        `silent` are hosts that were not heard of lately.

        Raises:
            SessionUnavailable: the index does not answer.
        """
        state = self._state
        self._until = self._clock() + seconds
        settled = state.index.flush(min(FLUSH, seconds / 4))
        complete = self._forth() and self._back()
        if self._mended:
            state.index.flush(min(FLUSH, seconds / 4))
        return {
            **self._counts,
            "mended": self._mended,
            "complete": complete and settled,
            "needs_publish": state.index.needs_publish(),
            "silent": sorted(node.host for node in state.index.nodes() if not node.alive),
            "examples": self._examples,
        }

    def _forth(self) -> bool:
        """What is here is in the index; whether there was time for all."""
        for first in range(0, len(self._state.table.keys), PART):
            if self._clock() > self._until:
                return False
            held = part(self._state, first, PART)
            self._counts["blocks"] += len(held)
            self._note(self._ask(partial(self._state.index.lacking, held)))
        return True

    def _back(self) -> bool:
        """What the index says of this host is so; whether there was time for all."""
        for swept in self._state.index.sweep(trim=self._repair):
            if self._clock() > self._until:
                return False
            self._counts["entries"] += swept.keys
            self._counts["dead"] += swept.dead
            self._counts["partly_dead"] += swept.partly
            self._mended += swept.changed
            self._note(differing(self._state, swept.mine))
        return True

    def _note(self, keys: Sequence[bytes]) -> None:
        """These seem to differ: look again, and mend."""
        new = [key for key in keys if key not in self._seen]
        if not new:
            return
        said = self._ask(partial(said_of, self._state, new))
        with self._state.lock:
            kinds = {key: kind_of(was, now) for key, was in said.items() if was != (now := here(self._state, key))}
        self._seen.update(list(kinds)[: SEEN - len(self._seen)])
        self._counts.update(kinds.values())
        for key, kind in kinds.items():
            if len(self._examples.setdefault(kind, [])) < EXAMPLES:
                self._examples[kind].append(key.hex())
        if self._repair:
            self._mended += sum(mend(self._state, list(kinds)).values())

    def _ask(self, question: Callable[[], T | None]) -> T:
        """A lookup has little time and may come too late for once."""
        for _ in range(TRIES):
            if (answer := question()) is not None:
                return answer
            time.sleep(PAUSE)
        raise SessionUnavailable(f"the index does not answer: {self._state.index.status()['reason']}")
