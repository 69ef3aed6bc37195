from __future__ import annotations

import numpy as np

from kvtier.eviction.uses import SHARE, Uses


def test_what_one_request_touches_again_and_again_is_used_once():
    uses, chain = Uses(), np.arange(10)
    for row in chain.tolist():
        uses.came(row)
    assert uses.used(chain).tolist() == [0] * 10, "coming and being saved is no use"
    for row in range(10, 30):
        uses.came(row)
    assert uses.used(chain).tolist() == [1] * 10
    assert uses.used(chain).tolist() == [1] * 10


def test_in_a_large_tier_uses_are_one_for_longer():
    """A 64th of what is there must have come in between."""
    uses = Uses()
    for row in range(100 * SHARE):
        uses.came(row)
    first = np.array([0])
    assert uses.used(first).tolist() == [1]
    for more, expected in ((100, 1), (3, 2)):
        for row in range(more):
            uses.came(100 * SHARE + row)
            uses.left()
        assert uses.used(first).tolist() == [expected]


def test_a_block_that_comes_back_begins_anew():
    uses = Uses()
    for row in (0, 1, 2, 3):
        uses.came(row)
    assert uses.used(np.array([0])).tolist() == [1]
    uses.left()
    uses.came(0)
    assert uses.used(np.array([0])).tolist() == [0]
