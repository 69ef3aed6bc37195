"""Looking through the whole index: for entries of the dead, and for one host's own.

One host at a time does it in the background (a key with a time to live is the baton), some thousand keys a second. It
deletes what only dead lives told and trims what some dead life told, each key only if it is still what it read. A host
that was not heard of for long is *buried* first: its record says that it was told nothing, so that it publishes again
should it come back; when a whole round has met nothing of it, its record goes too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from redis import RedisError

from kvtier.index.base import Life, Swept
from kvtier.index.entry import ENTRY, VERSION, unpack
from kvtier.index.find import FAULTS
from kvtier.index.masters import Command, Masters
from kvtier.index.nodes import BURY, ERASE, NODES, read_nodes
from kvtier.index.options import RedisIndexOptions
from kvtier.index.tell import script, witness

KEY_NBYTES = 34
BATON = b"kvtier:sweep"
COUNT = 512
"""Keys that SCAN is asked for at a time."""
HELD = 30.0
"""Seconds for which the baton is kept without a sign of life."""

TRIM = """
-- KEYS: a block. ARGV: the value that was read, and what it should be, or nothing to delete it.
-- Answers how many were changed.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '' then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


@dataclass(slots=True)
class Judged:
    """What the values of the index mean by one state of the node table; equal values are judged once.

    Attributes:
        lives: current incarnation of each node that may live.
        own: whose entries are wanted.
        met: dead nodes that were met.
    """

    lives: dict[int, int]
    own: Life
    met: set[int] = field(default_factory=set)
    known: dict[bytes, tuple[bytes, tuple[int, int] | None]] = field(default_factory=dict)

    def __call__(self, value: bytes) -> tuple[bytes, tuple[int, int] | None]:
        """What the value should be, and tier and bytes of the own entry in it."""
        if value not in self.known:
            if len(self.known) >= 8192:
                self.known.clear()
            self.known[value] = self._judge(value)
        return self.known[value]

    def _judge(self, value: bytes) -> tuple[bytes, tuple[int, int] | None]:
        if value[:1] != bytes([VERSION]) or len(value) % ENTRY.size != 1:
            return value, None  # another version's: not ours to touch
        kept, mine = b"", None
        for replica in unpack(value):
            if self.lives.get(replica.node, -1) > replica.incarnation or replica.node not in self.lives:
                self.met.add(replica.node)
                continue
            kept += ENTRY.pack(replica.node, replica.incarnation, replica.tier, replica.nbytes)
            if (replica.node, replica.incarnation) == (self.own.node, self.own.incarnation):
                mine = replica.tier, replica.nbytes
        return bytes([VERSION]) + kept if kept else b"", mine


class Sweep:
    """One round through all masters; `Swept` for each part. In the background, or in a thread that may wait."""

    def __init__(self, masters: Masters, own: Life, *, bury_after: float, trim: bool = True) -> None:
        """Take where to look, whose entries are wanted, after how long a silent host is buried, and whether to mend."""
        self._masters = masters
        self._own = own
        self._bury_after = bury_after
        self._trim = trim
        self._judged = Judged({}, own)
        self._silent: set[int] = set()

    def __iter__(self) -> Iterator[Swept]:
        self._silent = self._bury()
        self._judged = Judged(self._lives(), self._own)
        for number, client in enumerate(self._masters.all):
            cursor = 0
            while True:
                cursor, keys = cast("tuple[int, list[bytes]]", client.scan(cursor, count=COUNT))
                yield self._part(number, [key for key in keys if len(key) == KEY_NBYTES])
                if not cursor:
                    break
        if self._trim:
            self._erase(self._silent - self._judged.met)

    def _part(self, number: int, keys: Sequence[bytes]) -> Swept:
        values = self._exchange(number, [(b"GET", key) for key in keys])
        lives = self._lives()  # after the values: whoever told them was in the table before
        if lives != self._judged.lives:
            self._judged = Judged(lives, self._own, self._judged.met)
        judged = self._judged
        mine: list[tuple[bytes, int, int]] = []
        changes: list[tuple[bytes, bytes, bytes]] = []
        for key, value in zip(keys, values, strict=True):
            if not isinstance(value, bytes):  # gone meanwhile, or at another master by now
                continue
            should, own = judged(value)
            if own:
                mine.append((key, *own))
            if should != value:
                changes.append((key, value, should))
        changed = 0
        if changes and self._trim:
            answers = self._exchange(number, [script(TRIM, key, [was, to]) for key, was, to in changes])
            changed = sum(answer for answer in answers if isinstance(answer, int))
        dead = sum(not should for _, _, should in changes)
        return Swept(len(keys), dead, len(changes) - dead, changed, tuple(mine))

    def _lives(self) -> dict[int, int]:
        """Incarnation of each node but those that were buried and are silent still."""
        nodes = read_nodes(self._masters.of(NODES), self._bury_after)
        own = nodes.get(self._own.node)
        if own is None or own.incarnation != self._own.incarnation:
            raise RedisError("the node table does not have this host's life: who is dead is not known")
        return {node.node: node.incarnation for node in nodes.values() if node.alive or node.node not in self._silent}

    def _bury(self) -> set[int]:
        """Say of nodes that were silent for long that they were told nothing, so that they publish again; which."""
        nodes = read_nodes(self._masters.of(NODES), self._bury_after)
        silent = [node.node for node in nodes.values() if not node.alive and node.node != self._own.node]
        if not self._trim:
            return set(silent)
        return {node for node in silent if self._masters.run(BURY, NODES, [node, math.ceil(self._bury_after)])}

    def _erase(self, nodes: Iterable[int]) -> None:
        """Take buried nodes out of the table, if they were not heard of meanwhile; nothing refers to them."""
        for node in nodes:
            if self._masters.run(ERASE, NODES, [node]):
                for number, client in enumerate(self._masters.all if self._masters.spread else ()):
                    client.hdel(witness(self._masters.tag(number)), str(node))

    def _exchange(self, number: int, commands: Sequence[Command]) -> list[Any]:
        return self._masters.exchange({number: list(commands)}, scripts=(TRIM,))[number] if commands else []


class Sweeper:
    """Does a round now and then, a part at a time, when it is this host's turn; one thread at a time.

    Attributes:
        rounds: rounds that were ended.
        keys: keys that were looked at.
        deleted: keys of which only the dead told, and which were deleted or trimmed.
        faults: rounds that were given up.
    """

    def __init__(
        self, masters: Masters, options: RedisIndexOptions, clock: Callable[[], float], found: Callable[[Swept], None]
    ) -> None:
        """Take where to look, the paces, a monotonic clock, and whom to tell of each part."""
        self.rounds = self.keys = self.deleted = self.faults = 0
        self._masters = masters
        self._options = options
        self._clock = clock
        self._found = found
        self._parts: Iterator[Swept] | None = None
        self._held = 0.0
        self._due = math.inf

    def wait(self) -> float:
        """Seconds until `step` has something to do."""
        return self._due - self._clock()

    def step(self, own: Life, hosts: int) -> None:
        """Do what is due: take the baton, look at a part, or pass the baton on.

        Args:
            own: who sweeps.
            hosts: how many live.
        """
        now, every = self._clock(), self._options.sweep_every
        if self._due == math.inf:  # the first time: hosts that start together do not all ask at the same moment
            self._due = now + every * (0.1 + 0.9 * (own.node % 1000) / 1000)
        if now < self._due:
            return
        try:
            self._step(own, now, hosts)
        except FAULTS:
            self.faults += 1
            self._parts = None
            self._due = now + every / 10

    def _step(self, own: Life, now: float, hosts: int) -> None:
        options = self._options
        every, baton = options.sweep_every, f"{own.node} {own.incarnation}"
        if self._parts is None:
            if not self._masters.of(BATON).set(BATON, baton, nx=True, px=int(HELD * 1000)):
                self._due = now + every / 10
                return
            self._parts, self._held = iter(self._sweep(own)), now
        elif now > self._held + HELD / 3:
            self._masters.of(BATON).set(BATON, baton, px=int(HELD * 1000))
            self._held = now
        part = next(self._parts, None)
        if part is not None:
            self.keys += part.keys
            self.deleted += part.changed
            self._found(part)
            self._due = now + part.keys / options.sweep_rate
            return
        self.rounds += 1
        self._parts = None
        self._masters.of(BATON).set(BATON, baton, px=max(1, int(every * 1000)))
        self._due = now + every * max(1, hosts)

    def _sweep(self, own: Life) -> Sweep:
        return Sweep(self._masters, own, bury_after=self._options.bury_after)
