"""What was moved, as SGLang's collector of storage metrics reads it."""

from __future__ import annotations

import threading

KEPT = 1024
"""Batches that are remembered until somebody asks."""


class Stats:
    """Pages and GB/s of each batch since the last `take`, under the names of SGLang's `StorageMetrics`. Thread-safe.

    Attributes:
        prefetch_pgs, backup_pgs: pages that were loaded and stored.
        prefetch_bandwidth, backup_bandwidth: in GB/s.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()

    def loaded(self, pages: int, nbytes: int, seconds: float) -> None:
        """A batch was loaded; pages of so many bytes each."""
        self._note(self.prefetch_pgs, self.prefetch_bandwidth, pages, nbytes, seconds)

    def saved(self, pages: int, nbytes: int, seconds: float) -> None:
        """A batch was stored."""
        self._note(self.backup_pgs, self.backup_bandwidth, pages, nbytes, seconds)

    def take(self) -> Stats:
        """What there is since the last call."""
        taken = Stats()
        with self._lock:
            for name in ("prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth"):
                setattr(taken, name, getattr(self, name))
            self._forget()
        return taken

    def _forget(self) -> None:
        self.prefetch_pgs: list[int] = []
        self.backup_pgs: list[int] = []
        self.prefetch_bandwidth: list[float] = []
        self.backup_bandwidth: list[float] = []

    def _note(self, counts: list[int], paces: list[float], pages: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            if pages and len(counts) < KEPT:
                counts.append(pages)
                paces.append(pages * nbytes / max(seconds, 1e-9) / 1e9)
