"""A hierarchy with tiers that obey and misbehave on demand, worked by payload seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvtier.block import PAGE, slot_nbytes, verify_payload
from kvtier.client.local import LocalSession
from kvtier.hierarchy.answers import GrantState, Matched, Reserved
from kvtier.hierarchy.cache import Hierarchy, Limits
from kvtier.index.local import LocalIndex, LocalStore
from kvtier.memory.arena import Arena
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.payloads import key_of, payload_of
from kvtier.tiers.base import TierNumber

NBYTES = 20_000
SLOT_NBYTES = slot_nbytes(NBYTES)


class TestTier(MemoryTier):
    """Counts its calls; `hooks` run before a call and may block or raise."""

    __test__ = False

    def __init__(self, arena: Arena, capacity: int, name: str = "nvme") -> None:
        super().__init__(arena, capacity)
        self.name = name
        self.calls: Counter[str] = Counter()
        self.hooks: dict[str, Callable[[], None]] = {}
        self.evicted: list[bytes] = []

    def write(self, keys, slots):
        self._enter("write")
        return super().write(keys, slots)

    def read(self, keys, slots):
        self._enter("read")
        return super().read(keys, slots)

    def remove(self, keys):
        self._enter("remove")
        super().remove(keys)

    def contains(self, keys):
        self._enter("contains")
        return super().contains(keys)

    def inventory(self):
        self._enter("inventory")
        return super().inventory()

    def dropped(self):
        self._enter("dropped")
        gone, self.evicted = self.evicted, []
        return gone

    def usage(self):
        self._enter("usage")
        return super().usage()

    def evict(self, seed: int) -> None:
        """Drop a block of its own accord."""
        super().remove([key_of(seed)])
        self.evicted.append(key_of(seed))

    def seeds(self, among: Sequence[int]) -> set[int]:
        """Which of these it holds."""
        return {seed for seed in among if super(TestTier, self).contains([key_of(seed)])[0]}

    def _enter(self, call: str) -> None:
        self.calls[call] += 1
        if call in self.hooks:
            self.hooks[call]()


class Host:
    """One hierarchy; `nvme` and `gpu` are None where they are absent."""

    def __init__(
        self,
        blocks: int = 40,
        *,
        nvme: int | None = 4 << 20,
        gpu: int | None = None,
        limits: Limits | None = None,
        stored: Sequence[int] = (),
        writer_gone: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.now = 1000.0
        self.arena = Arena.private(blocks * SLOT_NBYTES)
        self.nvme = None if nvme is None else TestTier(self.arena, nvme)
        self.gpu = None if gpu is None else TestTier(self.arena, gpu, "gpu")
        for seed in stored:
            self.nvme._write(key_of(seed), payload_of(seed, NBYTES))
        tiers = {TierNumber.NVME: self.nvme, TierNumber.GPU: self.gpu}
        store = LocalStore()
        self.index = LocalIndex(store, store.register("test"))
        self.hierarchy = Hierarchy(
            self.arena,
            {number: tier for number, tier in tiers.items() if tier is not None},
            self.index,
            limits=limits,
            clock=lambda: self.now,
            writer_gone=writer_gone,
        )
        self.state = self.hierarchy.state
        self.mover = self.hierarchy.mover
        self.stats = self.state.stats

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        for tier in filter(None, (self.nvme, self.gpu)):
            tier.hooks.clear()
            tier.gate.set()
        self.hierarchy.close()

    def session(self) -> LocalSession:
        return LocalSession(self.hierarchy)

    def tiers_of(self, seed: int) -> list[str]:
        """Names of the tiers that the table says have it."""
        (found,) = self.hierarchy.inspect([key_of(seed)])
        return found["tiers"] if found else []

    def told(self, seed: int) -> int:
        """Tier that the index names; 0 for none."""
        (replicas,) = self.index.match([key_of(seed)])
        return replicas[0].tier if replicas else 0

    def check(self) -> None:
        """What holds at any quiet moment."""
        state, table, pool = self.state, self.state.table, self.state.cpu.pool
        here = {row for row in table.rows.values() if table.has(row, TierNumber.CPU)}
        assert {state.at[int(table.offset[row])] for row in here} == here
        assert len(state.at) == len(here) == len(state.policies[TierNumber.CPU])
        reserved = [offset for booked in state.ledger.reservations.values() for offset in booked.offsets]
        sizes = [pool.size_class(offset) for offset in [*state.at, *reserved]]
        assert pool.used == sum(sizes) <= pool.capacity
        ledger = state.ledger
        assert ledger.pinned_nbytes == sum(pin.nbytes for pin in ledger.pins.values())
        for key, row in table.rows.items():
            assert table.tiers[row], "a row without a tier"
            assert self.index.match([key])[0][0].tier == table.best(row)
        assert self.index._store.replicas.keys() == table.rows.keys()


def keys(seeds: Sequence[int]) -> list[bytes]:
    return [key_of(seed) for seed in seeds]


def reserve(session: LocalSession, seeds: Sequence[int], start: int = 0, nbytes: int = NBYTES) -> Reserved:
    return session.reserve(keys(seeds), [nbytes] * (len(seeds) - start), start)


def fill(session: LocalSession, reserved: Reserved, seeds: Sequence[int], nbytes: int = NBYTES) -> list[int]:
    """Write payloads into the granted slots of `seeds`; their positions."""
    granted = np.flatnonzero(reserved.grants["state"] == GrantState.GRANTED).tolist()
    for i in granted:
        offset = int(reserved.grants["offset"][i])
        session.writable()[offset : offset + nbytes] = np.frombuffer(payload_of(seeds[i], nbytes), np.uint8)
    return granted


def save(session: LocalSession, seeds: Sequence[int], nbytes: int = NBYTES) -> int:
    """Store a chain; how many blocks of it are new."""
    reserved = reserve(session, seeds, nbytes=nbytes)
    return sum(session.commit(reserved.ticket, fill(session, reserved, seeds, nbytes))) if reserved.ticket else 0


def states(reserved: Reserved) -> list[GrantState]:
    return [GrantState(int(state)) for state in reserved.grants["state"]]


def holds(session: LocalSession, matched: Matched, seeds: Sequence[int]) -> bool:
    """Whether the leased slots hold the payloads of these seeds, unchanged since they were leased."""
    for seed, slot in zip(seeds, matched.slots, strict=False):
        offset, nbytes = int(slot["offset"]), int(slot["nbytes"])
        payload = session.readable()[offset : offset + nbytes]
        verify_payload(payload.data, expected=key_of(seed))
        if payload.tobytes() != payload_of(seed, nbytes):
            return False
        if session.generations()[offset // PAGE] != slot["generation"]:
            return False
    return True
