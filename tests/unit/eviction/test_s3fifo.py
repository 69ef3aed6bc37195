"""What is S3-FIFO about the rule `S3FIFO`; the rest is the kit's."""

from __future__ import annotations

from kvtier.eviction.registry import policy
from kvtier.testing.eviction import Tier


def evict(tier: Tier, count: int = 1) -> list[int]:
    gone = tier.victims(count)
    for row in gone:
        tier.remove(row)
    return gone


def scan(tier: Tier, first: int, count: int) -> list[int]:
    """Single blocks that nobody uses again come in, each in the place of one that leaves."""
    gone = []
    for row in range(first, first + count):
        gone += evict(tier)
        tier.chain(row)
    return gone


def full(names=None) -> Tier:
    """A hundred blocks, 0 to 9 used again after the others came."""
    tier = Tier(policy("s3fifo", names))
    for row in range(100):
        tier.chain(row)
    for row in range(10):
        tier.policy.touch([row])
    return tier


def test_a_scan_does_not_push_out_what_is_used():
    tier = full()
    assert not set(scan(tier, 100, 1000)) & set(range(10))
    lru = Tier(policy("lru"))
    for row in range(100):
        lru.chain(row)
    assert set(range(10)) <= set(scan(lru, 100, 1000)), "LRU would have lost them"


def test_what_is_seen_first_has_a_tenth_and_leaves_in_the_order_that_it_came():
    tier = full()
    assert scan(tier, 100, 90 + 20) == [*range(10, 100), *range(100, 120)]


def test_each_use_is_one_more_turn():
    """Of two blocks in the main queue the one with more uses stays longer, though it was used longer ago."""
    tier = full()
    for first, used in ((100, 3), (200, 3), (300, 4)):
        scan(tier, first, 2)
        tier.policy.touch([used])
    small = [row for row in tier.nbytes if row >= 100]
    for row in small:
        tier.remove(row)
    order = tier.victims(len(tier.nbytes))
    assert order.index(4) > order.index(5)
    assert order.index(3) > order.index(4), "four is the younger one"


def test_what_comes_back_soon_goes_to_the_main_queue():
    """And what comes for the first time does not."""
    for known in (True, False):
        tier = full()
        (gone,) = evict(tier)
        scan(tier, 100, 1)
        tier.chain(gone if known else 200)
        assert ((gone if known else 200) in scan(tier, 300, 150)) != known


def test_ghosts_are_of_blocks_and_not_of_rows():
    """Rows are named anew: a block that was forgotten is known again in another row."""
    names: dict[int, str] = {}
    tier = full(lambda row: names.get(row, str(row)))
    (gone,) = evict(tier)
    tier.forget(gone)
    names[500] = str(gone)
    names[gone] = "another"
    tier.chain(500)
    tier.chain(gone)
    left = scan(tier, 1000, 150)
    assert 500 not in left
    assert gone in left


def test_without_names_a_row_that_is_used_again_has_no_ghost():
    tier = full()
    (gone,) = evict(tier)
    tier.forget(gone)
    tier.chain(gone)
    assert gone in scan(tier, 100, 150)


def test_as_many_ghosts_as_blocks_in_the_main_queue():
    tier = full()
    first = evict(tier)[0]
    scan(tier, 100, 20)
    tier.chain(first)
    assert first in scan(tier, 300, 150), "ten blocks are in the main queue: after twenty others it is forgotten"
