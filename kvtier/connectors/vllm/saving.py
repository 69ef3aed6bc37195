"""What the scheduler's side has saved: blocks that are complete, out of pages that are held until then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvtier.connectors.vllm.extra import extras
from kvtier.connectors.vllm.held import HeldPages
from kvtier.connectors.vllm.link import Link
from kvtier.connectors.vllm.lookup import Lookups
from kvtier.connectors.vllm.messages import GONE, Save
from kvtier.connectors.vllm.sequence import Sequence
from kvtier.connectors.vllm.stored import Stored
from kvtier.keys import chain


class Saving:
    """Saves that are to be done, and those that are under way. Used in the scheduler's thread only.

    Args:
        stored: how the engine's layers lie in blocks.
        link: to the host.
        lookups: which know what names a request's KV.
        counters: what happened, by name.
        clock: monotonic seconds.
    """

    def __init__(
        self, stored: Stored, link: Link, lookups: Lookups, counters: Counter[str], clock: Callable[[], float]
    ) -> None:
        self._stored, self._link, self._lookups, self._counters = stored, link, lookups, counters
        self._clock = clock
        self._late: list[Save] = []
        self._under: dict[int, tuple[Sequence, int, int]] = {}
        self._numbers = 0
        self._manager: Any = None
        self._held: HeldPages | None = None

    def bind(self, manager: Any) -> None:
        """Take vLLM's `KVCacheManager`, which knows the pages of every request."""
        self._manager, self._held = manager, HeldPages(manager.block_pool, self._clock)

    @property
    def none(self) -> int:
        """The page that stands for none."""
        return self._held.null if self._held is not None else 0

    @property
    def pending(self) -> bool:
        """Whether pages are held."""
        return bool(self._held)

    @property
    def soon_free(self) -> bool:
        """Whether it is better to wait for pages that are held than to preempt a request."""
        return self._held is not None and self._held.soon_free

    def complete(self, sequence: Sequence, end: int, pages: tuple[list[int], ...] | None = None) -> list[Save]:
        """Save the blocks before token `end` that are not stored yet; holds their pages.

        Args:
            sequence: of which.
            end: behind the last token that is known and computed, or will be with this step.
            pages: of its request; vLLM is asked for them unless given.
        """
        step, first = self._stored.block_tokens, sequence.stored
        last = end // step
        if last <= first or self._held is None or sequence.loading or not self._hashed(sequence, last):
            return []
        if pages is None:
            pages = self._manager.get_block_ids(sequence.request.request_id)
        whole, last = last, min(last, first + self._held.room // (step // self._stored.page_tokens * len(pages)))
        if last < whole:  # the rest of them in a later step
            self._counters["refused:engine_pressure"] += max(0, whole - max(last, sequence.pressed))
            sequence.pressed = max(whole, sequence.pressed)
        if last == first:
            return []
        blocks = sequence.blocks(self._stored, range(first * step, last * step), pages, none=self._held.null)
        held = [page for group in blocks.pages for page in group]
        if GONE in held:
            return []  # a window has passed what could not be saved in its time
        self._numbers += 1
        self._held.hold(self._numbers, held)
        self._under[self._numbers] = sequence, first, last
        sequence.stored = last
        return [Save(self._numbers, blocks)]

    def later(self, sequence: Sequence, end: int, pages: tuple[list[int], ...]) -> None:
        """The same with the next step, for a request that has ended."""
        self._late += self.complete(sequence, end, pages)

    def due(self) -> list[Save]:
        """What was to be done with the next step."""
        due, self._late = self._late, []
        return due

    def give_up(self) -> None:
        """Do without what was to be done with the next step: perhaps none will follow."""
        for save in self.due():
            self.saved(save.number, 0)

    def saved(self, number: int, blocks: int) -> None:
        """All ranks have answered to a save: so many blocks of it are stored, from its first on."""
        sequence, first, last = self._under.pop(number)
        if self._held is not None:
            self._held.release(number)
        self._counters["saved_blocks"] += min(blocks, last - first)
        if first + blocks < last:  # refused: once more when its next block is complete
            sequence.stored = min(sequence.stored, first + blocks)

    def _hashed(self, sequence: Sequence, blocks: int) -> bool:
        """Whether the keys of so many blocks are known; hashes what is new of them."""
        if sequence.recipe is None and sequence.lora is None:  # its lookup came too early, or was late
            sequence.recipe = self._lookups.recipe(None, self._lookups.generation)
        space = self._link.space(sequence.recipe, 0) if sequence.recipe is not None else None
        if space is None or not sequence.sound:
            return False
        keys, step = sequence.keys, self._stored.block_tokens
        if (had := len(keys)) < blocks:
            extra = extras(sequence.request, step, blocks)
            tokens = sequence.request.all_token_ids[had * step : blocks * step]
            root = keys[-1] if keys else space.keyspace.root
            keys += chain(root, tokens, step, extra=extra[had:] if extra is not None else None)
        return True
