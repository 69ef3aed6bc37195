"""Arrow, with a limit to the memory that it takes; whatever serves Arrow to others imports it from here.

Who sends a record batch may have compressed it: 17 kB of zeros become 512 MiB, in Arrow's pool, before anybody sees
them. Arrow has no limit of its own, but its allocator has one, if it is told before the library is loaded. Payloads of
kvtier's own clients are not compressed, and lie where gRPC put them: they take nothing of it.
"""

from __future__ import annotations

import os
import sys

MOST = 1 << 30
"""Bytes of Arrow's pool. What does not fit fails, and with it the call."""
_TOLD = {
    "ARROW_DEFAULT_MEMORY_POOL": "mimalloc",
    "MIMALLOC_RESERVE_OS_MEMORY": f"{MOST >> 10}KiB",
    "MIMALLOC_DISALLOW_OS_ALLOC": "1",
}
bounded = "pyarrow" not in sys.modules
"""Whether the limit holds: not where Arrow was loaded before."""

_before = {name: os.environ.get(name) for name in _TOLD}
os.environ |= _TOLD
try:
    import pyarrow
    from pyarrow import flight
finally:
    for _name, _value in _before.items():  # children are told nothing
        if _value is None:
            del os.environ[_name]
        else:
            os.environ[_name] = _value

__all__ = ["MOST", "bounded", "flight", "pyarrow"]
