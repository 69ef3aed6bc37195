"""What every `EvictionPolicy` must pass.

class TestMyPolicy(EvictionKit):
    make_policy = MyPolicy
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from kvtier.eviction.base import EvictionPolicy


@dataclass
class Tier:
    """A policy, and beside it what it must know: the oracle.

    Attributes:
        policy: the one under test.
        nbytes: size of each block that is in the tier.
        parents: the parent of each block that was ever told one, whether it is in the tier or not.
    """

    policy: EvictionPolicy
    nbytes: dict[int, int] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)

    def insert(self, row: int, nbytes: int = 1, parent: int | None = None) -> None:
        """A block comes in."""
        self.policy.insert(row, nbytes, parent)
        self.nbytes[row] = nbytes
        self.parents.pop(row, None)
        if parent is not None:
            self.parents[row] = parent

    def adopt(self, row: int, parent: int) -> None:
        """The parent of a block becomes known."""
        self.policy.adopt(row, parent)
        if row in self.nbytes:
            self.parents[row] = parent

    def chain(self, *rows: int, nbytes: int = 1) -> None:
        """A chain comes in, head first, and is used."""
        for i, row in enumerate(rows):
            self.insert(row, nbytes, rows[i - 1] if i else None)
        self.policy.touch(rows)

    def remove(self, row: int) -> None:
        """A block leaves, and may come back."""
        self.policy.remove(row)
        self.nbytes.pop(row, None)

    def forget(self, row: int) -> None:
        """A block leaves for good."""
        self.policy.forget(row)
        self.nbytes.pop(row, None)
        self.parents = {child: parent for child, parent in self.parents.items() if row not in (child, parent)}

    def children(self, row: int) -> set[int]:
        """Children of a block that are in the tier."""
        return {child for child, parent in self.parents.items() if parent == row and child in self.nbytes}

    def evictable(self, pinned: Collection[int]) -> set[int]:
        """Blocks that are neither pinned nor ancestors, through blocks of the tier, of pinned ones."""
        free = set(self.nbytes)
        for row in pinned:
            kept = row
            while kept in free:
                free.discard(kept)
                kept = self.parents.get(kept, -1)
        return free

    def victims(self, need: int, pinned: Collection[int] = ()) -> list[int]:
        """Ask for victims, and hold the answer against the laws."""
        chosen = self.policy.victims(need, set(pinned).__contains__)
        assert chosen == self.policy.victims(need, set(pinned).__contains__), "asking changes nothing"
        free = self.evictable(pinned)
        if need <= 0 or sum(self.nbytes[row] for row in free) < need:
            assert chosen == [], "all or nothing"
            return chosen
        assert len(chosen) == len(set(chosen)), "a block leaves once"
        assert set(chosen) <= free, "a pinned block, or its ancestor, or an absent one was chosen"
        sizes = [self.nbytes[row] for row in chosen]
        assert sum(sizes[:-1]) < need <= sum(sizes), "as many as it takes, and not one more"
        self.children_come_first(chosen)
        return chosen

    def children_come_first(self, rows: Sequence[int]) -> None:
        """All children of each of these are among them, before it."""
        place = {row: i for i, row in enumerate(rows)}
        for child, parent in self.parents.items():
            if child in self.nbytes and parent in place:
                assert place.get(child, len(rows)) < place[parent], "a parent came before its child"


class EvictionKit:
    """Laws of `kvtier.eviction.base.EvictionPolicy`; give `make_policy`."""

    make_policy: Callable[[], EvictionPolicy]

    def tier(self) -> Tier:
        """An empty tier."""
        return Tier(type(self).make_policy())

    def test_an_empty_tier_has_no_victims(self) -> None:
        tier = self.tier()
        assert tier.victims(1) == []
        assert tier.policy.with_descendants([1]) == []
        assert len(tier.policy) == 0

    def test_nothing_is_needed_nothing_leaves(self) -> None:
        tier = self.tier()
        tier.chain(1, 2)
        assert tier.victims(0) == tier.victims(-5) == []

    def test_a_chain_leaves_from_its_tail(self) -> None:
        tier = self.tier()
        tier.chain(1, 2, 3)
        assert [tier.victims(need) for need in (1, 2, 3, 4)] == [[3], [3, 2], [3, 2, 1], []]

    def test_a_chain_leaves_from_its_tail_though_it_was_never_used(self) -> None:
        """Staged head first, the head is the oldest."""
        tier = self.tier()
        for row in (1, 2, 3):
            tier.insert(row, parent=row - 1 or None)
        assert tier.victims(3) == [3, 2, 1]

    def test_a_parent_waits_for_its_last_child(self) -> None:
        tier = self.tier()
        tier.chain(1, 2)
        tier.chain(3)
        tier.insert(4, parent=1)
        assert tier.victims(4)[-1] in (1, 3)
        assert 1 not in tier.victims(3, pinned=[4])
        assert tier.victims(3, pinned=[4]) == []

    def test_a_pinned_block_keeps_its_ancestors(self) -> None:
        tier = self.tier()
        tier.chain(1, 2, 3, 4)
        assert tier.victims(1, pinned=[3]) == [4]
        assert tier.victims(2, pinned=[3]) == []

    def test_sizes_are_added_up(self) -> None:
        tier = self.tier()
        tier.chain(1, nbytes=10)
        tier.chain(2, nbytes=300)
        assert sum(tier.nbytes[row] for row in tier.victims(11)) >= 11
        assert tier.victims(311) == []

    def test_a_parent_that_comes_back_is_still_a_parent(self) -> None:
        tier = self.tier()
        tier.chain(1, 2, 3)
        tier.remove(2)
        tier.insert(2, parent=1)
        tier.policy.touch([3])
        assert tier.victims(2) == [3, 2]

    def test_a_parent_that_comes_later_is_a_parent(self) -> None:
        tier = self.tier()
        tier.insert(2, parent=1)
        tier.insert(1)
        tier.policy.touch([2])
        assert tier.victims(2) == [2, 1]

    def test_a_parent_may_become_known_later(self) -> None:
        tier = self.tier()
        tier.insert(2)
        tier.insert(1)
        tier.adopt(2, 1)
        tier.adopt(9, 1)
        tier.policy.touch([2])
        assert tier.victims(2) == [2, 1]

    def test_a_row_that_is_used_again_is_nobodys_parent(self) -> None:
        tier = self.tier()
        tier.chain(1, 2)
        tier.forget(1)
        tier.insert(1)
        tier.policy.touch([2])
        assert tier.policy.is_leaf(1)
        assert tier.policy.with_descendants([1]) == [1]
        assert tier.victims(1, pinned=[2]) == [1]

    def test_what_is_unknown_may_leave(self) -> None:
        tier = self.tier()
        tier.chain(1)
        for row in (7, 100_000):
            tier.policy.remove(row)
            tier.policy.forget(row)
        assert tier.victims(1) == [1]

    def test_descendants_come_with_their_ancestors_each_once(self) -> None:
        tier = self.tier()
        tier.chain(1, 2, 3, 4)
        tier.insert(5, parent=2)
        tier.chain(6)
        rows = tier.policy.with_descendants([4, 2, 3, 2, 99])
        assert sorted(rows) == [2, 3, 4, 5]
        tier.children_come_first(rows)

    def test_many_blocks_keep_their_order(self) -> None:
        """More than any first look at the oldest, in one long chain and one wide fan."""
        tier = self.tier()
        tier.chain(*range(1, 3000))
        for row in range(3000, 5000):
            tier.insert(row, parent=1)
        assert len(tier.victims(4999)) == 4999
        assert len(tier.victims(2500, pinned=[1000])) == 2500
        assert sorted(tier.policy.with_descendants([1])) == list(range(1, 5000))

    def test_it_agrees_with_the_laws_at_random(self) -> None:
        """Come, go, be used, come back, be forgotten: a forest of rows, parents below children."""
        rng = random.Random(11)  # noqa: S311
        tier = self.tier()
        for _ in range(600):
            row = rng.randrange(1, 120)
            act = rng.random()
            if act < 0.45:
                parent = rng.choice([None, rng.randrange(row)]) if row > 1 else None
                tier.insert(row, rng.randrange(1, 5), tier.parents.get(row, parent))
            elif act < 0.6:
                self.use(tier, row)
            elif act < 0.75:
                tier.remove(row)
            elif act < 0.8:
                tier.forget(row)
            pinned = rng.sample(sorted(tier.nbytes), min(len(tier.nbytes), rng.randrange(4)))
            tier.victims(rng.randrange(80), pinned)
            assert len(tier.policy) == len(tier.nbytes)
            some = rng.sample(range(1, 120), 5)
            rows = tier.policy.with_descendants(some)
            tier.children_come_first(rows)
            assert set(some) & set(tier.nbytes) <= set(rows)
            assert tier.policy.is_leaf(row) == (not tier.children(row))

    def use(self, tier: Tier, row: int) -> None:
        """Touch a block with its ancestors, as far as they are in the tier."""
        chain = []
        while row in tier.nbytes:
            chain.append(row)
            row = tier.parents.get(row, -1)
        tier.policy.touch(chain[::-1])
