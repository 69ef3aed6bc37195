"""What is first-in-first-out about the rule `FIFO`; the rest is the kit's."""

from __future__ import annotations

import random

from kvtier.eviction.registry import policy
from kvtier.testing.eviction import Tier


def test_the_chain_that_came_first_leaves_first_though_it_was_used_since():
    tier = Tier(policy("fifo"))
    tier.chain(1, 2)
    tier.chain(3, 4)
    tier.policy.touch([1, 2])
    assert tier.victims(4) == [2, 1, 4, 3]


def test_what_comes_back_is_as_young_as_what_comes_for_the_first_time():
    tier = Tier(policy("fifo"))
    for row in (1, 2, 3):
        tier.chain(row)
    tier.remove(1)
    tier.chain(1)
    assert tier.victims(3) == [2, 3, 1]


def test_a_young_child_keeps_its_old_parent():
    tier = Tier(policy("fifo"))
    tier.chain(1)
    tier.chain(2)
    tier.insert(3, parent=1)
    assert tier.victims(3) == [2, 3, 1]


def test_blocks_without_children_leave_in_the_order_of_a_queue():
    """Oracle: a list, which uses do not change."""
    rng = random.Random(5)
    tier, queue = Tier(policy("fifo")), []
    for row in range(2000):
        tier.chain(row)
        queue.append(row)
        tier.policy.touch([rng.choice(queue)])
        if rng.random() < 0.4:
            need = rng.randrange(1, 4)
            gone = tier.victims(need) if need <= len(queue) else []
            assert gone == queue[: len(gone)]
            for one in gone:
                tier.remove(one)
                queue.remove(one)
    assert queue
