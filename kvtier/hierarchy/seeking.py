"""What other hosts have of a chain: looked up in the index, away from the lock and from the door's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import filterfalse, islice, takewhile

from kvtier.block import slot_nbytes
from kvtier.hierarchy.state import State
from kvtier.index.base import Replica
from kvtier.tiers.base import TierNumber

LOOKUP = 0.03
"""Seconds that one who may wait, waits for a lookup; the index itself gives up sooner."""
THREADS = 4
"""Lookups at a time; each is bounded by the index itself."""
SEEKS = 64
"""Lookups that may be under way or wait; what is asked for beyond them is not looked up."""
FIRST, MOST = 512, 4096
"""Blocks that the index is asked for at once: of a chain the first, and later ones. What nobody has costs little then,
and no lookup is so large that it is late whatever the index does."""
PART = 256
"""Blocks that the table takes note of at a time."""
ABROAD = 1 << 15
"""Blocks of other hosts that the table knows of at a time."""
STALE = 5.0
"""Seconds after which what was heard of other hosts, and not fetched, is forgotten: they may have dropped it."""
SHUN = 2.0
"""Seconds for which a block that could not be fetched is not looked up again."""
PATIENCE, ABSENT = 20.0, 0.5
"""What nobody has is not looked up again for so many times as long as the lookup took, at most for so many seconds. So
many requests for it, and one that waits and is asked for again and again, cost a busy index next to nothing."""
ABSENTEES = 1 << 12
"""Blocks that are remembered because nobody had them."""


@dataclass(slots=True, eq=False)
class Seek:
    """One lookup.

    Attributes:
        done: when the table knows what was found, and that is being fetched.
        answered: whether the index answered.
    """

    done: Future[None] = field(default_factory=Future)
    answered: bool = False


@dataclass(frozen=True, slots=True)
class Sought:
    """The lookups that one who asks waits for; empty when there are none."""

    seeks: tuple[Seek, ...] = ()

    @property
    def why(self) -> str:
        """Why what is not known after them is a miss."""
        if not all(seek.done.done() for seek in self.seeks):
            return "seeking"
        return "absent" if all(seek.answered for seek in self.seeks) else "index_unavailable"


class Seeker:
    """Looks blocks up that the table does not know; one lookup a key.

    What live hosts have becomes rows of the tier `PEER`, which are staged like those of any other tier.
    """

    def __init__(self, state: State, flying: Callable[[bytes], bool]) -> None:
        """Take the state, and what says whether a block is being fetched."""
        self._state = state
        self._flying = flying
        self._seeks: dict[bytes, Seek] = {}
        self._absent: dict[bytes, tuple[float, float]] = {}
        """First blocks of what nobody had, when that was, and for how many seconds it counts."""
        self._pending = 0
        self._threads = ThreadPoolExecutor(THREADS, "kvtier-seek")

    def close(self) -> None:
        """Stop; lookups under way end first."""
        self._threads.shutdown(wait=True)

    @property
    def pending(self) -> int:
        """Lookups that are under way or wait."""
        return self._pending

    def seek(self, keys: Sequence[bytes], then: Callable[[], None]) -> Sought:
        """Look up those of a chain's keys that nobody here has or is about to have. The lock is held.

        Args:
            keys: of the chain, from the first one that the table does not know.
            then: called when the table knows what was found, in the thread that looked.
        """
        state = self._state
        if not keys or state.others is None or not state.index.others():
            return Sought()
        known, now = state.table.rows, state.clock()
        seeks: dict[Seek, None] = {}
        fresh = []
        for key in dict.fromkeys(keys):
            if key in self._seeks:
                seeks[self._seeks[key]] = None
            elif key not in known:
                if self._barred(key) or self._shuns(key, now) or self._is_absent(key, now):
                    break  # without it, those behind it are of no use
                fresh.append(key)
        if fresh:
            seeks[self._start(keys, fresh, then)] = None
        return Sought(tuple(seeks))

    def sweep(self) -> None:
        """Forget what was heard long ago."""
        state, more = self._state, True
        while more:
            with state.lock:
                now = state.clock()
                old = list(islice(filterfalse(self._flying, _before(state.abroad, now, STALE)), PART))
                state.reclaim(old)
                for key in list(islice(_before(state.unfetched, now, SHUN), PART)):
                    del state.unfetched[key]
            more = len(old) == PART

    def _barred(self, key: bytes) -> bool:
        """Whether it is being saved here, or dropped."""
        return key in self._state.ledger.writing or key in self._state.forgetting

    def _shuns(self, key: bytes, now: float) -> bool:
        """Whether it could not be fetched a moment ago."""
        since = self._state.unfetched.get(key)
        return since is not None and 0 <= now - since < SHUN

    def _is_absent(self, key: bytes, now: float) -> bool:
        """Whether nobody had it a moment ago."""
        since, seconds = self._absent.get(key, (0.0, 0.0))
        return 0 <= now - since < seconds

    def _start(self, chain: Sequence[bytes], fresh: list[bytes], then: Callable[[], None]) -> Seek:
        seek = Seek()
        seek.done.set_running_or_notify_cancel()
        if self._pending < SEEKS:
            with suppress(RuntimeError):  # closed
                self._threads.submit(self._run, seek, list(chain), fresh, then)
                self._pending += 1
                self._seeks.update(dict.fromkeys(fresh, seek))
                return seek
        self._state.stats.faults["seeks_refused"] += 1
        seek.done.set_result(None)
        return seek

    def _run(self, seek: Seek, chain: list[bytes], fresh: list[bytes], then: Callable[[], None]) -> None:
        state, began = self._state, self._state.clock()
        try:
            at, most = 0, FIRST
            while at < len(fresh):
                part = fresh[at : at + most]
                found = self._ask(part)
                seek.answered = found is not None
                if found:
                    self._learn(chain, found)
                    then()
                missing = next((key for key in part if key not in (found or {})), None)
                if missing is not None:
                    if seek.answered:
                        self._miss(missing, state.clock() - began)
                    break
                at, most = at + len(part), MOST
        except Exception:  # noqa: BLE001 - a lookup that fails is a miss
            with state.lock:
                state.stats.faults["seek_error"] += 1
        finally:
            with state.lock:
                self._pending -= 1
                for key in fresh:
                    del self._seeks[key]
            seek.done.set_result(None)

    def _miss(self, key: bytes, took: float) -> None:
        """Nobody has this, as a lookup that took so many seconds found out."""
        with self._state.lock:
            self._absent.pop(key, None)
            self._absent[key] = self._state.clock(), min(ABSENT, PATIENCE * took)
            if len(self._absent) > ABSENTEES:
                del self._absent[next(iter(self._absent))]

    def _ask(self, keys: list[bytes]) -> dict[bytes, int] | None:
        """Payload bytes of what this host can get of these from others; None when the index does not answer."""
        index, others = self._state.index, self._state.others
        answer: list[tuple[Replica, ...]] | None = index.match(keys)
        if answer is None or others is None:
            return None
        nodes = {node.node: node for node in index.nodes() if node.alive and node.door and node.node != index.node}
        there: dict[bytes, tuple[Replica, ...]] = {}
        for key, replicas in zip(keys, answer, strict=True):
            live = tuple(replica for replica in replicas if replica.node in nodes)
            if live:
                there[key] = live
        if there:
            others.found(list(there), list(there.values()), nodes)
        ways = others.contains(list(there))
        return {key: replicas[-1].nbytes for (key, replicas), way in zip(there.items(), ways, strict=True) if way}

    def _learn(self, chain: list[bytes], found: dict[bytes, int]) -> None:
        """The table knows what was found, as far as the chain has no gap."""
        state = self._state
        for at in range(0, len(chain), PART):
            with state.lock:
                coming: list[int] = []
                for key in chain[at : at + PART]:
                    if state.row(key) is not None:
                        continue
                    full = len(state.abroad) + len(coming) >= ABROAD
                    fits = 0 < slot_nbytes(found.get(key, 0)) <= state.cpu.pool.capacity
                    if not fits or full or self._barred(key):
                        found = {}
                        break
                    coming.append(state.learn(key, found[key]))
                    state.table.tokens[coming[-1]] = state.table.usual.get(found[key], 0)
                state.enter(coming, TierNumber.PEER)
            if not found:
                return


def _before(seen: Mapping[bytes, float], now: float, seconds: float) -> Iterator[bytes]:
    """The first of these, oldest first, that were seen longer ago than so many seconds."""
    return (key for key, _ in takewhile(lambda one: not 0 <= now - one[1] < seconds, seen.items()))
