"""What is least-recently-used about the rule `LRU`; the rest is the kit's."""

from __future__ import annotations

import random

from kvtier.eviction.registry import policy
from kvtier.testing.eviction import Tier


def test_the_chain_that_was_used_longest_ago_leaves_first():
    tier = Tier(policy("lru"))
    tier.chain(1, 2)
    tier.chain(3, 4)
    tier.policy.touch([1, 2])
    assert tier.victims(4) == [4, 3, 2, 1]


def test_a_shorter_use_spares_the_head_only():
    """The picture in the package's docstring: ranks 8 7 2 1 after two uses."""
    tier = Tier(policy("lru"))
    tier.chain(1, 2, 3, 4)
    tier.policy.touch([1, 2])
    tier.chain(5)
    assert tier.victims(5) == [4, 3, 2, 1, 5]


def test_it_is_the_greedy_choice_of_the_oldest_free_leaf():
    """Oracle: take, again and again, the block used longest ago whose children are all taken."""
    rng = random.Random(3)
    tier, clock, used = Tier(policy("lru")), 0, {}
    for row in range(1, 300):
        parent = rng.randrange(row) or None
        tier.insert(row, rng.randrange(1, 4), parent)
        clock += 1
        used[row] = clock
        if rng.random() < 0.3:
            chain, at = [], rng.randrange(1, row + 1)
            while at:
                chain.append(at)
                at = tier.parents.get(at, 0)
            tier.policy.touch(chain[::-1])
            for one in chain:
                clock += 1
                used[one] = clock
    for need in (1, 7, 100, 400):
        pinned = set(rng.sample(range(1, 300), 5))
        expected, freed = [], 0
        while freed < need:
            leaves = [r for r in used if r not in pinned and r not in expected and tier.children(r) <= set(expected)]
            if not leaves:
                expected = []
                break
            expected.append(min(leaves, key=used.__getitem__))
            freed += tier.nbytes[expected[-1]]
        assert tier.victims(need, pinned) == expected
