"""Every eviction policy obeys the laws of the seam."""

from __future__ import annotations

from kvtier.eviction.lru import PrefixLRU
from kvtier.testing.eviction import EvictionKit


class TestPrefixLRU(EvictionKit):
    make_policy = PrefixLRU
