"""Copies of this host's blocks for other hosts: of what is asked for often, and of all that is hot when it goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.hierarchy.state import State
from kvtier.tiers.base import OWN

EVERY = 5.0
"""Seconds between looks at what is hot."""
AGAIN = 600.0
"""Seconds after which a block is offered again, if it still has one replica."""
ROUND_NBYTES, ROUND_BLOCKS = 64 << 20, 256
"""What is offered at once; of hot blocks, in one look."""
ANSWER = 2.0
"""Seconds for an answer to an offer."""
HOT, HANDED = 1 << 12, 1 << 16
"""Blocks that are thought of in one look, and when a host goes; more do not travel in the time that it has."""
OFFERED = 1 << 14
"""Blocks that are remembered because they were offered."""
POLL, IDLE = 0.1, 3.0
"""Seconds between looks at what others have fetched, and without any progress until no more is expected."""


OWN_MASK = np.uint8(sum(1 << tier for tier in OWN))
Block = tuple[bytes, int]
"""Key, and bytes of the payload."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What became of a host's blocks.

    Attributes:
        offered: blocks that only this host had.
        taken: of these, others said that they fetch them.
        handed: of these, others have them.
    """

    offered: int = 0
    taken: int = 0
    handed: int = 0


class Sharing:
    """Offers blocks to the other hosts of the fleet, which fetch them by themselves. Its calls wait for the network.

    Args:
        state: of the host.
        often: hits a minute from which on a block gets a second replica; 0 for never.
        clock: monotonic seconds.
        sleep: waits.
    """

    def __init__(
        self,
        state: State,
        often: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._state = state
        self._often = often
        self._clock = clock
        self._sleep = sleep
        self._offered: dict[bytes, float] = {}
        self._turn = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look for hot blocks from now on."""
        if self._often and self._state.others is not None:
            self._thread = threading.Thread(target=self._run, name="kvtier-share", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def replicate(self) -> int:
        """Offer what is hot and has one replica; how many of it others take."""
        state = self._state
        if not self._often or state.draining or not state.index.others():
            return 0
        now = self._clock()
        with state.lock:
            hot = self._hottest(self._often, HOT)
            rows = [row for row in hot if not self._was_offered(state.table.keys[row], now)]
            blocks = self._blocks(_ancestors_first(state, rows))
        batch = next(_rounds(self._alone(blocks)), None)
        if batch is None:
            return 0
        self._note([key for key, _ in batch], now)
        return len(self._offer(batch, now + ANSWER)[0])

    def hand_over(self, seconds: float) -> HandedOver:
        """Offer all that only this host has, the hottest first, and wait until others have what they took."""
        state, until = self._state, self._clock() + seconds
        with state.lock:
            state.draining = True
            if state.others is None:
                return HandedOver()
            blocks = self._blocks(_ancestors_first(state, self._hottest(0.0, HANDED)))
        rounds = _rounds(self._alone(blocks))
        offered = taken = handed = 0
        left: list[Block] = []
        moved = self._clock()
        while self._clock() < min(until, moved + IDLE) and not self._closing.is_set():
            if not left:
                left = next(rounds, [])
                offered += len(left)
            if not left:
                break
            batch, left = self._offer(left, min(until, self._clock() + ANSWER))
            if batch:
                taken += len(batch)
                handed += self._arrived(batch, until)
                moved = self._clock()
            else:  # they have no room now, or fetch what they took before
                self._sleep(POLL)
        return HandedOver(offered, taken, handed)

    def _run(self) -> None:
        while not self._closing.wait(EVERY):
            try:
                self.replicate()
            except Exception:  # noqa: BLE001 - a look that fails must not end all others
                with self._state.lock:
                    self._state.stats.faults["sharing_error"] += 1

    def _hottest(self, least: float, most: int) -> list[int]:
        """Rows of this host's own blocks that are hit so often, the hottest first. The lock is held."""
        table, now = self._state.table, self._state.clock()
        end = len(table.keys)
        # Heat only falls, so few rows are left to look at closely, in a table of millions too.
        rows = np.flatnonzero((table.heat[:end] >= least) & ((table.tiers[:end] & OWN_MASK) > 0))
        heat = table.heat_of(rows, now)
        rows, heat = rows[heat >= least], heat[heat >= least]
        # Of those that are equally hot, the one that was used last is first.
        order = np.lexsort((-table.used[rows], -heat))[:most]
        hottest: list[int] = rows[order].tolist()
        return hottest

    def _blocks(self, rows: Sequence[int]) -> list[Block]:
        return [(self._state.table.keys[row], int(self._state.table.nbytes[row])) for row in rows]

    def _alone(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Those of these that no other live host has; none when the index does not answer."""
        for at in range(0, len(blocks), ROUND_BLOCKS):
            part = blocks[at : at + ROUND_BLOCKS]
            elsewhere = self._elsewhere([key for key, _ in part])
            if elsewhere is None:
                return
            yield from (block for block in part if block[0] not in elsewhere)

    def _elsewhere(self, keys: Sequence[bytes]) -> set[bytes] | None:
        """Those of these that another live host has; None when the index does not answer."""
        answer = self._state.index.match(keys)
        if answer is None:
            return None
        node = self._state.index.node
        return {key for key, some in zip(keys, answer, strict=True) if any(one.node != node for one in some)}

    def _offer(self, batch: list[Block], until: float) -> tuple[list[Block], list[Block]]:
        """Offer blocks to one host after the other; those that are taken, and those that nobody takes."""
        state = self._state
        others = state.others
        if others is None:
            return [], batch
        nodes = [node for node in state.index.nodes() if node.alive and node.door and node.node != state.index.node]
        left, self._turn = batch, self._turn + 1
        for place in range(len(nodes)):
            if not left or self._clock() >= until:
                break
            keys, nbytes = [key for key, _ in left], np.array([size for _, size in left], np.int64)
            # It takes the first ones, as many as it has room for.
            left = left[others.offer(nodes[(self._turn + place) % len(nodes)], keys, nbytes, until) :]
        taken = batch[: len(batch) - len(left)]
        with state.lock:
            state.stats.offers["made"] += len(batch)
            state.stats.offers["accepted"] += len(taken)
        return taken, left

    def _arrived(self, batch: list[Block], until: float) -> int:
        """Wait until others have these, as long as more of them come; how many they have."""
        keys = [key for key, _ in batch]
        there, moved = 0, self._clock()
        while there < len(keys) and self._clock() < min(until, moved + IDLE) and not self._closing.is_set():
            self._sleep(POLL)
            now = len(self._elsewhere(keys) or ())
            if now > there:
                there, moved = now, self._clock()
        return there

    def _was_offered(self, key: bytes, now: float) -> bool:
        since = self._offered.get(key)
        return since is not None and now - since < AGAIN

    def _note(self, keys: Sequence[bytes], now: float) -> None:
        for key in keys:
            self._offered.pop(key, None)
            self._offered[key] = now
        while len(self._offered) > OFFERED:
            del self._offered[next(iter(self._offered))]


def _ancestors_first(state: State, rows: Sequence[int]) -> list[int]:
    """These rows in their order, but each after those of its ancestors that are among them."""
    wanted, order = set(rows), dict[int, None]()
    for row in rows:
        path: list[int] = []
        at: int | None = row
        while at is not None and at in wanted and at not in order:
            path.append(at)
            wanted.discard(at)
            at = state.table.parent_of(at)
        order.update(dict.fromkeys(reversed(path)))
    return list(order)


def _rounds(blocks: Iterator[Block]) -> Iterator[list[Block]]:
    """Cut blocks into what is offered at once."""
    batch: list[Block] = []
    total = 0
    for block in blocks:
        if batch and (total + block[1] > ROUND_NBYTES or len(batch) == ROUND_BLOCKS):
            yield batch
            batch, total = [], 0
        batch.append(block)
        total += block[1]
    if batch:
        yield batch
