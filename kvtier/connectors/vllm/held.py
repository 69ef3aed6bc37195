"""Pages that must stay as they are until they are saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

LARGEST_SHARE = 4
"""Of the engine's pages one in so many may be held."""
SOON = 0.1
"""Seconds after which nobody waits for the pages of a save any more."""


class HeldPages:
    """References to vLLM's pages, beside those of its requests.

    A page with a reference is not given to anybody else, whatever becomes of its request: it ends, is aborted or
    preempted. Used in the scheduler's thread only.

    Args:
        pool: vLLM's `BlockPool`.
        clock: monotonic seconds.
    """

    def __init__(self, pool: Any, clock: Callable[[], float]) -> None:
        self._pool, self._clock = pool, clock
        self._held: dict[int, list[Any]] = {}
        self._since: dict[int, float] = {}
        self._pages = 0

    def __len__(self) -> int:
        """How many saves hold pages."""
        return len(self._held)

    @property
    def room(self) -> int:
        """How many more may be held."""
        return int(self._pool.num_gpu_blocks) // LARGEST_SHARE - self._pages

    @property
    def soon_free(self) -> bool:
        """Whether a save will give pages back to the engine, and soon: those that its request needs no more."""
        since = self._clock() - SOON
        return any(
            block.ref_cnt == 1
            for number, blocks in self._held.items()
            if self._since[number] >= since
            for block in blocks
        )

    @property
    def null(self) -> int:
        """The page that stands for none."""
        return int(self._pool.null_block.block_id)

    def hold(self, number: int, pages: Iterable[int]) -> None:
        """Keep pages for a save."""
        blocks = [self._pool.blocks[page] for page in pages]
        self._pool.touch(blocks)
        self._held[number], self._since[number] = blocks, self._clock()
        self._pages += len(blocks)

    def release(self, number: int) -> None:
        """Let the pages of a save go."""
        blocks = self._held.pop(number)
        del self._since[number]
        self._pages -= len(blocks)
        # The last ones first: vLLM gives away first what is freed first, and a prefix is of use without its end.
        self._pool.free_blocks(reversed(blocks))
