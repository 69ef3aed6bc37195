"""One tier over several devices.

    homes       which device has which block; which device a new one goes to
    together    calls to several devices at the same time
    tier        Several, which joins them

A chain's blocks are spread over all devices, so that they come up and go down at the speed of all of them. What that
costs: while one device is away, a chain ends for its readers at the first block that is there.

What each device has, it says itself: its inventory is the truth, and blocks are found where they are. A hash only says
where a new block goes, the same after every restart, so that a block that is saved again meets its former copy.
"""

from kvtier.tiers.several.tier import Several

__all__ = ["Several"]
