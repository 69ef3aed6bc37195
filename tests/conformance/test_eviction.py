"""Every eviction policy obeys the laws of the seam."""

from __future__ import annotations

from functools import partial

from kvtier.eviction.registry import policy
from kvtier.testing.eviction import EvictionKit


class TestLRU(EvictionKit):
    make_policy = partial(policy, "lru")


class TestFIFO(EvictionKit):
    make_policy = partial(policy, "fifo")


class TestS3FIFO(EvictionKit):
    make_policy = partial(policy, "s3fifo")


class TestS3FIFOThatKnowsBlocksAgain(EvictionKit):
    make_policy = partial(policy, "s3fifo", lambda row: row % 50)


class TestCost(EvictionKit):
    make_policy = partial(policy, "cost")
