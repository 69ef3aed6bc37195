"""What the brain of a host knows, and the few ways in which it changes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.block import slot_nbytes
from kvtier.errors import TierUnavailable
from kvtier.eviction.admission import Admission
from kvtier.eviction.base import EvictionPolicy
from kvtier.eviction.registry import policy
from kvtier.hierarchy.accounts import Accounts
from kvtier.hierarchy.demand import Demand
from kvtier.hierarchy.device import DeviceSlots
from kvtier.hierarchy.ledger import Lease, Ledger
from kvtier.hierarchy.limits import Rules
from kvtier.hierarchy.news import News
from kvtier.hierarchy.pace import Pace
from kvtier.hierarchy.stats import Stats
from kvtier.hierarchy.table import BlockTable
from kvtier.index.base import Index
from kvtier.peers.base import OtherHosts
from kvtier.tiers.base import OWN, Inventory, Tier, TierNumber
from kvtier.tiers.cpu import CpuTier

OWED = 1 << 16
"""Dropped blocks that are remembered for a tier that is away; with more of them it is gone through when it is back."""
EVICTED = frozenset(("cpu_evicted", "gpu_evicted", "nvme_evicted", "nvme_behind", "quota"))
"""Why blocks leave a tier to make room."""
UNFETCHED = 1 << 14
"""Blocks that are remembered because other hosts did not give them."""


class Clock(Protocol):
    """Seconds since the epoch."""

    def __call__(self) -> float:
        """Now."""
        ...


class State:
    """Table, tiers, policies, ledger and counters of one host, and the lock that guards them.

    Methods are called with `lock` held.
    """

    def __init__(
        self, cpu: CpuTier, tiers: Mapping[TierNumber, Tier], index: Index, clock: Clock, rules: Rules | None = None
    ) -> None:
        rules = rules or Rules()
        self.lock = threading.RLock()
        self.table = BlockTable()
        self.accounts = Accounts()
        """Of the tiers of this host: what is known of other hosts has no keyspace."""
        self.ledger = Ledger()
        self.stats = Stats()
        self.demand = Demand(clock())
        self.cpu = cpu
        self.tiers = dict(tiers)
        self.device = DeviceSlots(self.table, self.tiers.get(TierNumber.GPU))
        self.index = index
        self.clock = clock
        self.started = clock()
        self.policies: dict[TierNumber, EvictionPolicy] = {
            TierNumber.CPU: policy(rules.policy, lambda row: self.table.keys[row])
        }
        if TierNumber.GPU in self.tiers:
            self.policies[TierNumber.GPU] = policy("lru")
        self.admission = Admission(rules.admission, rules.endurance, clock)
        self.at: dict[int, int] = {}
        """Row of the block in each slot of the arena."""
        self.forgetting: Counter[bytes] = Counter()
        """Condemned blocks that tiers have not been told of yet; until then nobody saves them anew."""
        self.pace = Pace()
        self.owed: dict[TierNumber, set[bytes]] = {tier: set() for tier in self.tiers}
        """Dropped blocks that a tier could not be told of because it was away."""
        self.behind: set[TierNumber] = set()
        """Tiers that missed more than is remembered block by block: they keep only what the table says they have."""
        self.news: News | None = None
        """For those who follow this host from outside; None when nobody may."""
        self.publishing: Callable[[], dict[str, Any]] | None = None
        """How telling them goes, for the status; None when nobody may."""
        self.watching: list[set[bytes]] = []
        """Sets that want to hear of every block that is dropped."""
        self.abroad: dict[bytes, float] = {}
        """Blocks that other hosts have and this one has not, and when that was heard: the rows that are in the tier
        `PEER`, and in no other. Neither the index nor an inventory ever hears of them."""
        self.unfetched: dict[bytes, float] = {}
        """Blocks that other hosts did not give lately, and when."""
        self.uncertain: Counter[TierNumber] = Counter()
        """Tiers that came back and have not been asked yet what they still have."""
        self.draining = False
        """Whether this host is being emptied: nothing new comes in."""
        self.relieving = False
        """Whether old blocks are being written down to NVMe because the CPU tier is full."""
        self.writes = {tier: threading.Lock() for tier in self.tiers}
        """One writer a tier, so that what it says it dropped is heard in order. Taken before `lock`."""

    @property
    def others(self) -> OtherHosts | None:
        """All other hosts; None where there can be none."""
        return cast("OtherHosts | None", self.tiers.get(TierNumber.PEER))

    def pinned(self, row: int) -> bool:
        """Whether somebody besides the table refers to the block's slot."""
        return self.cpu.pool.references(int(self.table.offset[row])) > 1

    def row(self, key: bytes) -> int | None:
        """Row of a block, if it is known."""
        return self.table.rows.get(key)

    def rows(self, keys: Iterable[bytes]) -> list[int]:
        """Rows of those of the blocks that are known."""
        return [row for key in keys if (row := self.table.rows.get(key)) is not None]

    def learn(self, key: bytes, nbytes: int, parent: int = -1) -> int:
        """Row of a block, made when it is not known."""
        known = self.table.rows.get(key)
        return known if known is not None else self.table.add(key, nbytes, parent, self.clock())

    def adopt(self, row: int, parent: int) -> None:
        """The parent of a block that did not know it is this one."""
        self.table.adopt(row, parent)
        for order in self.policies.values():
            order.adopt(row, parent)

    def link(self, rows: NDArray[np.int64]) -> None:
        """These are a chain, -1 where one is unknown; what a tier brought from an earlier life did not know that."""
        ancestors: dict[int, int] = {}
        for place in self.table.strangers(rows):
            child, parent = int(rows[place]), int(rows[place - 1])
            unknown = min(child, parent) >= 0 and self.table.parent_of(child) is None
            # A client may make keys up: none may become its own ancestor.
            if unknown and self._root(parent, ancestors) != child:
                self.adopt(child, parent)

    def _root(self, row: int, ancestors: dict[int, int]) -> int:
        """The first ancestor that the table has; leaves short cuts to it, so that many walks cost little."""
        path = []
        while (above := ancestors.get(row, self.table.parent_of(row))) is not None:
            path.append(row)
            row = above
        ancestors.update(dict.fromkeys(path, row))
        return row

    def touch(self, rows: NDArray[np.int64]) -> None:
        """A chain, or what is there of it, was used."""
        masks = self.table.tiers[rows]
        self.table.uses[rows] += 1
        for tier, order in self.policies.items():
            order.touch(rows[(masks >> tier & 1) > 0].tolist())

    def place(
        self, rows: Sequence[int], offsets: Sequence[int], generations: Sequence[int], said: NDArray[Any]
    ) -> None:
        """These slots hold the blocks, which are about to `enter` the CPU tier; the table keeps their first references.

        Args:
            rows: of the blocks.
            offsets: of the slots.
            generations: of the slots.
            said: what their headers say, as a `STORED` array.
        """
        table, rows = self.table, list(rows)
        table.offset[rows], table.generation[rows] = offsets, generations
        table.note(rows, said)
        self.at.update(zip(offsets, rows, strict=True))

    def enter(self, rows: Sequence[int], tier: TierNumber) -> None:
        """A tier has these blocks now."""
        table, order = self.table, self.policies.get(tier)
        entering = np.array(rows, np.int64)
        former = table.best_of(entering)
        if tier is not TierNumber.PEER:
            new = np.unique(entering[(table.tiers[entering] >> tier & 1) == 0])
            self.accounts.enter(tier, table.space[new], table.nbytes[new])
        table.tiers[entering] |= 1 << tier
        self._settle(entering, tier)
        if order is not None:
            for row, nbytes in zip(rows, table.nbytes[entering].tolist(), strict=True):
                order.insert(row, slot_nbytes(nbytes), table.parent_of(row))
        if self.news is not None:
            self.news.entered(entering, tier)
        if tier is not TierNumber.PEER:
            self._tell(entering[(former == 0) | (former > tier)].tolist(), tier)

    def _settle(self, rows: NDArray[np.int64], tier: TierNumber) -> None:
        """What this host has is not abroad."""
        table, now = self.table, self.clock()
        if tier is TierNumber.PEER:
            self.abroad.update((table.keys[row], now) for row in rows.tolist())
        elif self.abroad:
            table.tiers[rows] &= ~np.uint8(1 << TierNumber.PEER)
            for row in rows.tolist():
                self.abroad.pop(table.keys[row], None)

    def leave(self, rows: Sequence[int], tier: TierNumber, why: str) -> None:
        """A tier no longer has these blocks; what no tier has any more is dropped."""
        table, order = self.table, self.policies.get(tier)
        asked = np.array(list(dict.fromkeys(rows)), np.int64)
        here = asked[(table.tiers[asked] >> tier & 1) > 0]
        if not len(here):
            return
        if self.news is not None:
            self.news.left(here, tier)
        former = table.best_of(here)
        if tier is not TierNumber.PEER:
            self.accounts.leave(tier, table.space[here], table.nbytes[here])
        table.tiers[here] &= ~np.uint8(1 << tier)
        if order is not None:
            for row in here.tolist():
                order.remove(row)
        if tier is TierNumber.CPU:
            self._free(here.tolist())
        best = table.best_of(here)
        if tier is TierNumber.PEER:
            self._unlearn(here.tolist())
            return
        self._age(here, tier, why)
        self._drop(here[best == 0].tolist(), why)
        for other in OWN:
            self._tell(here[(best == other) & (former != other)].tolist(), other)

    def _age(self, rows: NDArray[np.int64], tier: TierNumber, why: str) -> None:
        """Note how long ago blocks were used that made room."""
        if why in EVICTED:
            ages, now = self.stats.evicted[tier.name.lower()], self.clock()
            for used in self.table.used[rows].tolist():
                ages.observe(max(0.0, now - used))

    def _free(self, rows: Sequence[int]) -> None:
        """Let go of the slots of these blocks."""
        rows = list(rows)
        offsets = self.table.offset[rows]
        self.table.offset[rows] = -1
        for offset in offsets.tolist():
            del self.at[offset]
        self.cpu.pool.release(offsets)

    def _drop(self, rows: Sequence[int], why: str) -> None:
        """No tier has these blocks any more."""
        gone = self._remove(rows)
        if gone:
            self.index.discard(gone)
            self.stats.dropped[why] += len(gone)
            self.demand.dropped(gone, evicted=why in EVICTED)

    def _unlearn(self, rows: Sequence[int]) -> None:
        """It is known no more that other hosts have these."""
        for key in self._remove(rows):
            del self.abroad[key]

    def _remove(self, rows: Sequence[int]) -> list[bytes]:
        """Take rows out of the table; their keys."""
        for order in self.policies.values():
            for row in rows:
                order.forget(row)
        return [self.table.remove(row) for row in rows]

    def unfetchable(self, keys: Iterable[bytes]) -> None:
        """Other hosts did not give these: they are not asked for them again at once."""
        now = self.clock()
        for key in keys:
            self.unfetched.pop(key, None)
            self.unfetched[key] = now
        while len(self.unfetched) > UNFETCHED:
            del self.unfetched[next(iter(self.unfetched))]

    def owe(self, tier: TierNumber, keys: Iterable[bytes]) -> None:
        """A tier has not heard that it is to forget these: until it has, they are not written there anew."""
        if tier not in self.behind:
            self.owed[tier].update(keys)
            if len(self.owed[tier]) > OWED:
                self.owed[tier].clear()
                self.behind.add(tier)

    def owes(self, tier: TierNumber, key: bytes) -> bool:
        """Whether a tier may have a block that it was to forget."""
        return tier in self.behind or key in self.owed[tier]

    def reclaim(self, keys: Iterable[bytes]) -> None:
        """These are this host's own now: what is heard of them abroad does not count."""
        if self.abroad:
            self.leave(self.rows(key for key in keys if key in self.abroad), TierNumber.PEER, "")

    def _tell(self, rows: Sequence[int], tier: TierNumber) -> None:
        """Let the index know the tier that has these blocks."""
        if rows:
            self.index.add([self.table.keys[row] for row in rows], tier, self.table.nbytes[list(rows)].tolist())

    def heard(self, tier: TierNumber, dropped: Iterable[bytes]) -> None:
        """Take note of what a tier evicted by itself."""
        self.leave(self.rows(dropped), tier, f"{self.tiers[tier].name}_evicted")

    def take_inventory(self, tier: TierNumber) -> int:
        """Learn what a tier holds already; how many blocks that are."""
        try:
            inventory = self.tiers[tier].inventory()
        except TierUnavailable:
            self.stats.faults[f"{self.tiers[tier].name}_unavailable"] += 1
            return 0
        self.adopt_inventory(tier, inventory)
        return len(inventory)

    def adopt_inventory(self, tier: TierNumber, inventory: Inventory, dropped: Set[bytes] = frozenset()) -> None:
        """A tier has these blocks, but for what was dropped; those that the table does not know are new."""
        self.reclaim(inventory.keys)
        entering, new = [], []
        sizes = inventory.records["nbytes"].tolist()
        for i, key in enumerate(inventory.keys):
            if key in dropped or key in self.forgetting or self.owes(tier, key):
                continue
            row = self.row(key)
            if row is None:
                row = self.learn(key, sizes[i])
                new.append((row, i))
            if not self.table.has(row, tier):
                entering.append(row)
        if new:
            self.table.note([row for row, _ in new], inventory.records[[i for _, i in new]])
        self.enter(entering, tier)

    def end(self, lease: Lease) -> None:
        """Let go of what a lease, which was struck out, held."""
        self.cpu.pool.release(lease.offsets)
        self.device.release(lease.inside)

    def free_slot(self, offset: int) -> None:
        """Give back a slot that no block was placed in."""
        self.cpu.pool.release(np.array([offset], np.int64))

    def move(self, source: str, target: str, nbytes: int) -> None:
        """Count one block moved."""
        self.stats.moves[source, target] += 1
        self.stats.moved_nbytes[source, target] += nbytes
