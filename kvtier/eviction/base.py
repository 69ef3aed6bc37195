"""What every eviction policy can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """In which order blocks leave a tier.

    Blocks are small integers (rows of the block table). Pure: no clock, no I/O, no lock; the hierarchy calls it under
    its own. Prefix order is part of the contract: a parent is never a victim before all its children in the tier are
    victims too, whichever of them came first.
    """

    def insert(self, row: int, nbytes: int, parent: int | None) -> None:
        """A block came in, as the one used last; `parent` may be unknown or absent from this tier."""
        ...

    def adopt(self, row: int, parent: int) -> None:
        """The parent of a block became known; ignored when the block is not in the tier."""
        ...

    def touch(self, chain: Sequence[int]) -> None:
        """A chain of present blocks was used, head first; the tail is touched first, so the head leaves last."""
        ...

    def remove(self, row: int) -> None:
        """A block left; unknown rows are ignored. Its children stay its children, should it come back."""
        ...

    def forget(self, row: int) -> None:
        """A block left for good: another may get its row."""
        ...

    def victims(self, need: int, pinned: Callable[[int], bool]) -> list[int]:
        """Blocks to evict, children before parents, that together free `need` bytes, and not one more than that takes.

        All or nothing: an empty list when the unpinned blocks cannot free as much. A pinned block also keeps its
        ancestors.
        """
        ...

    def with_descendants(self, rows: Sequence[int], most: int | None = None) -> list[int]:
        """These blocks (absent ones left out) and all their descendants in the tier, children before parents.

        Args:
            rows: of the blocks.
            most: answer nothing if these are more than so many.
        """
        ...

    def is_leaf(self, row: int) -> bool:
        """Whether no child of this block is in the tier."""
        ...

    def __len__(self) -> int:
        """Blocks in the tier."""
        ...
