"""What the calls of a tier share."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from kvtier.errors import CorruptPayload
from kvtier.tiers.nvme.health import Health
from kvtier.tiers.nvme.life import Entry
from kvtier.tiers.nvme.log import RegionLog
from kvtier.tiers.nvme.recovery import Opened


class State:
    """The open store, and how it fares.

    Attributes:
        lock: guards all that follows; never held during I/O.
        read_done: notified when reads are done.
        opened: file and log; made anew when somebody deleted the files.
        counters: events by name.
        write_health, read_health: of the device.
    """

    def __init__(self, opened: Opened, clock: Callable[[], float]) -> None:
        self.lock = threading.Lock()
        self.read_done = threading.Condition(self.lock)
        self.opened = opened
        self.counters: Counter[str] = Counter()
        self.write_health, self.read_health = Health(clock), Health(clock)

    @property
    def log(self) -> RegionLog:
        """What is in the store."""
        return self.opened.log

    def account_read(self, entry: Entry, wrong: OSError | CorruptPayload | None) -> None:
        """What became of reading what lies there. Under the lock."""
        key = entry.row.key
        if wrong is None:
            self.counters["read_nbytes"] += entry.row.nbytes
            self.log.touch(key, entry.place)
        elif isinstance(wrong, OSError):
            self.counters["read_error"] += 1
            self.log.suspect(key, entry.place)
        else:
            self.counters["corrupt"] += 1
            self.log.corrupt(key, entry.place)

    def account_write(self, fault: str, *, final: bool = False) -> None:
        """Whether the last write succeeded, or why not. Under the lock."""
        if fault:
            self.counters["write_error"] += 1
            self.write_health.failed(fault, final=final)
        else:
            self.write_health.succeeded()
