"""Which pages are free, and how often each of the others is referred to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtier.errors import ConfigError, PoolFull, UsageError


class PagePool:
    """So many pages, by number. Not thread-safe: used under the lock of the page tables.

    A page is taken with one reference, and is free again when its last reference is released. All pages are alike, so
    whatever is free serves whoever asks: there is nothing to defragment.

    Args:
        count: pages.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"a pool of {count} pages holds nothing; give it at least 1")
        self.count = count
        self._references = [0] * count
        self._free = list(reversed(range(count)))

    @property
    def free(self) -> int:
        """Pages that nobody refers to."""
        return len(self._free)

    def references(self, page: int) -> int:
        """References of a page; 0 when it is free."""
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """Take so many free pages, each with one reference; those that were never used are in order.

        Raises:
            PoolFull: there are not so many; none is taken.
        """
        if count > len(self._free):
            raise PoolFull(
                f"{count} pages are needed, and {len(self._free)} of {self.count} are free: free sequences that are "
                "done, or make the pool with more pages"
            )
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        for page in taken:
            self._references[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to each of these pages that are in use."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: list[int]) -> list[int]:
        """Drop one reference of each of these pages, as often as it is named; returns those that are free now.

        Raises:
            UsageError: more references than a page has; none is dropped.
        """
        for page, times in Counter(pages).items():
            if times > self._references[page]:
                raise UsageError(f"page {page} was released more often than it was retained")
        freed = []
        for page in reversed(pages):
            self._references[page] -= 1
            if not self._references[page]:
                freed.append(page)
        self._free += freed
        return freed
