"""What is cost-aware about the rule `Cost`; the rest is the kit's."""

from __future__ import annotations

from kvtier.eviction.cost import DEEP
from kvtier.eviction.registry import policy
from kvtier.testing.eviction import Tier

MIB = 1 << 20


def test_of_two_blocks_the_one_that_is_deeper_stays():
    tier = Tier(policy("cost"))
    tier.chain(*range(1, 2 * DEEP), nbytes=MIB)
    tier.chain(2 * DEEP, nbytes=MIB)
    assert tier.victims(MIB) == [2 * DEEP], "it came last, and costs a third"
    lru = Tier(policy("lru"))
    lru.chain(*range(1, 2 * DEEP), nbytes=MIB)
    lru.chain(2 * DEEP, nbytes=MIB)
    assert lru.victims(MIB) == [2 * DEEP - 1]


def test_depth_is_learnt_from_the_chain():
    """Blocks that a tier brought from an earlier life did not know their parents."""
    tier = Tier(policy("cost"))
    for row in range(1, 2 * DEEP):
        tier.insert(row, MIB)
    for row in range(2, 2 * DEEP):
        tier.adopt(row, row - 1)
    tier.policy.touch(range(1, 2 * DEEP))
    tier.chain(2 * DEEP, nbytes=MIB)
    assert tier.victims(MIB) == [2 * DEEP]


def test_of_two_blocks_the_larger_leaves():
    tier = Tier(policy("cost"))
    tier.chain(1, nbytes=MIB)
    tier.chain(2, nbytes=2 * MIB)
    tier.chain(3, nbytes=MIB)
    assert tier.victims(MIB) == [2]


def test_what_is_used_stays_but_not_for_ever():
    """Used twice it outlives once-seen blocks until age has reached what its uses are worth, not longer."""
    tier = Tier(policy("cost"))
    for row in range(10):
        tier.chain(row, nbytes=MIB)
    tier.policy.touch([0])
    gone = []
    for row in range(10, 60):
        for victim in tier.victims(MIB):
            tier.remove(victim)
            gone.append(victim)
        tier.chain(row, nbytes=MIB)
    assert gone[:9] == [*range(1, 10)], "among equals the one used longest ago"
    assert 10 <= gone.index(0) < 40


def test_what_is_taken_out_for_another_reason_ages_nobody():
    tier = Tier(policy("cost"))
    for row in range(4):
        tier.chain(row, nbytes=MIB)
    for row in range(10, 30):
        tier.chain(row, nbytes=MIB)
        tier.remove(row)
        tier.policy.touch([3])
    tier.remove(3)
    tier.chain(5, nbytes=MIB)
    tier.policy.touch([0])
    assert tier.victims(4 * MIB) == [1, 2, 5, 0], "5 is worth as much as 1 and 2, and not more because 3 was dear"


def test_a_chain_is_worth_what_its_deepest_block_is():
    """A parent is never below its children, so that they are found at once."""
    tier = Tier(policy("cost"))
    tier.chain(1, 2, 3, nbytes=MIB)
    tier.chain(4, nbytes=MIB)
    assert tier.victims(4 * MIB) == [4, 3, 2, 1]
