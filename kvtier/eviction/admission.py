"""What is written to NVMe."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError
from kvtier.eviction.ghosts import Ghosts, numbers_of

RULES = ("auto", "all", "second")
MODEL_BLOCKS = 4096
"""Blocks in each model; when it has more, half of all blocks are no longer looked at."""
ENOUGH = 256
"""Blocks that a model must have had, of those asked for, before it is believed."""
WINDOW = 16
"""Times its number of blocks that a model is asked before what was counted so far counts half."""
FULL = 7 / 8
"""Part of a tier that is in use when it is full: a region log empties whole regions, of which it has eight or more."""
DAY, HOUR = 86_400, 3_600


class _Model:
    """A small tier, least recently used, that holds no bytes: which of the blocks asked for would it have had?"""

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, int] = OrderedDict()
        self.used = 0
        self.hits = 0.0

    def ask(self, block: int, nbytes: int, capacity: float, *, keep: bool) -> None:
        """Ask for a block; one that is not here is kept if `keep` says so or there is room."""
        if block in self.blocks:
            self.blocks.move_to_end(block)
            self.hits += 1
        elif keep or self.used + nbytes <= capacity:
            self.blocks[block] = nbytes
            self.used += nbytes
        self.shrink(capacity)

    def shrink(self, capacity: float) -> None:
        """Drop what has no room."""
        while self.used > capacity and self.blocks:
            self.used -= self.blocks.popitem(last=False)[1]

    def sample(self, limit: int) -> None:
        """Drop the blocks whose number is not below this."""
        for block in [block for block in self.blocks if block >= limit]:
            self.used -= self.blocks.pop(block)


class Admission:
    """Decides which blocks that leave memory are written to NVMe. Pure: no I/O, no lock.

    Everything is written while the tier has room. When it is full, what is written pushes out what may be read, and
    blocks seen for the first time are mostly never seen again; whether to refuse those depends on how soon a tier of
    this size forgets. So two models of the tier run beside it, on a sample of the blocks at a scale of a few thousand
    (SHARDS; Waldspurger et al., FAST 2015): one keeps everything, one keeps what is seen for the second time, and the
    rule of the one that would have had more of what was lately asked for is followed. Everything is written until they
    have had enough to tell.

    Args:
        rule: "auto" as above, "all", or "second": second sight whenever the tier is full.
        budget: bytes a day that the device may write; 0 for no limit. When less than half of an hour's worth is left,
            first sight is refused; when nothing is, everything.
        clock: seconds; when it is set back, nothing is added for that.

    Attributes:
        refused: blocks by reason: `first_sight`, `endurance`.

    Raises:
        ConfigError: there is no such rule.
    """

    def __init__(self, rule: str, budget: int, clock: Callable[[], float]) -> None:
        if rule not in RULES:
            raise ConfigError(f'nvme.admission is {rule!r}; set it to "auto", "all" or "second"')
        self.refused: Counter[str] = Counter()
        self._rule = rule
        self._ghosts = Ghosts()
        self._capacity = self._used = 0
        self._all, self._second = _Model(), _Model()
        self._limit = 1 << 64
        self._asked = 0
        self._clock = clock
        self._rate = budget / DAY
        self._most = self._left = self._rate * HOUR
        self._then = clock()
        self._charged = self._written = 0

    @property
    def selective(self) -> bool:
        """Whether blocks seen for the first time are refused now."""
        if self._rule == "all" or not self._used >= FULL * self._capacity > 0:
            return False
        return self._rule == "second" or (self._second.hits >= ENOUGH and self._second.hits > self._all.hits)

    def admit(self, keys: Sequence[bytes], nbytes: Sequence[int], seen_again: Sequence[bool]) -> list[bool]:
        """Whether each of these blocks, which the tier does not have, shall be written.

        Args:
            keys: addresses.
            nbytes: what each takes.
            seen_again: whether it was used since it was stored.
        """
        seen = self._ask(keys, nbytes, np.array(seen_again, bool))
        selective = self.selective
        self._refill()
        return [self._decide(size, seen=again, selective=selective) for size, again in zip(nbytes, seen, strict=True)]

    def read(self, keys: Sequence[bytes], nbytes: Sequence[int]) -> None:
        """These blocks were read from the tier."""
        self._ask(keys, nbytes, np.ones(len(keys), bool))

    def usage(self, used: int, capacity: int, written: int) -> None:
        """How full the tier is, and the bytes that it has written since it was opened, all overhead included."""
        self._used, self._capacity = used, capacity
        self._left += self._charged - max(0, written - self._written)
        self._charged, self._written = 0, written

    def _decide(self, nbytes: int, *, seen: bool, selective: bool) -> bool:
        if selective and not seen:
            self.refused["first_sight"] += 1
            return False
        if self._rate:
            if self._left < (0 if seen else self._most / 2):
                self.refused["endurance"] += 1
                return False
            self._left -= nbytes
            self._charged += nbytes
        return True

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._most, self._left + self._rate * max(0.0, now - self._then))
        self._then = now

    def _ask(self, keys: Sequence[bytes], nbytes: Sequence[int], seen: NDArray[np.bool_]) -> list[bool]:
        """Let the models be asked for blocks, and remember them; which of them were seen before."""
        blocks = numbers_of(keys)
        seen = seen | self._ghosts.remember(blocks)
        answer: list[bool] = seen.tolist()
        if self._capacity and self._rule == "auto":
            for block, size, again in zip(blocks.tolist(), nbytes, answer, strict=True):
                if block < self._limit:
                    self._model(block, size, seen=again)
        return answer

    def _model(self, block: int, nbytes: int, *, seen: bool) -> None:
        everything, second = self._all, self._second
        capacity = self._capacity * (self._limit / (1 << 64))
        everything.ask(block, nbytes, capacity, keep=True)
        second.ask(block, nbytes, capacity, keep=seen)
        if everything.used < FULL * capacity:
            everything.hits = second.hits = 0
        self._asked += 1
        if self._asked >= WINDOW * len(everything.blocks):
            self._asked = 0
            everything.hits, second.hits = everything.hits / 2, second.hits / 2
        if len(everything.blocks) > MODEL_BLOCKS:
            self._limit //= 2
            for model in (everything, second):
                model.sample(self._limit)
