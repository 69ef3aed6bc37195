"""One request, as the scheduler's side knows it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from kvtier.connectors.vllm.lookup import Found
from kvtier.connectors.vllm.messages import GONE, Blocks, Recipe
from kvtier.connectors.vllm.stored import Stored


class Sequence:
    """Which blocks of a request are stored, and what it was promised.

    Attributes:
        request: vLLM's.
        lora: name and path of its LoRA.
        recipe: its keyspace; None while that is not known.
        sound: whether it may be stored: False once the weights, or what it is computed on, may have changed under it.
        keys: of its blocks, as far as they were hashed.
        stored: leading blocks that are stored, or on their way there.
        lookup: the lookup that is under way, or whose answer was not used yet.
        asked: when that began.
        turn: number of the step in which the engine asked about it last.
        found: what is leased for it.
        local: tokens that the engine itself had when it was last promised something.
        loading: whether the workers are loading what it was promised.
        pressed: leading blocks that were counted as refused because the engine may not hold more pages.
        runs: whether it was computed since its pages were allocated: another connector's load may be under way before.
        barred: whether it is promised nothing any more, because that could not be loaded.
    """

    def __init__(self, request: Any) -> None:
        self.request = request
        adapter = request.lora_request
        self.lora: tuple[str, str] | None = None if adapter is None else (adapter.lora_name, adapter.lora_path)
        self.recipe: Recipe | None = None
        self.sound = True
        self.keys: list[bytes] = []
        self.stored = 0
        self.lookup: Future[Found] | None = None
        self.asked = 0.0
        self.turn = -1
        self.found: Found | None = None
        self.local = 0
        self.loading = False
        self.pressed = 0
        self.runs = False
        self.barred = False

    @property
    def keeps(self) -> bool:
        """Whether it is looked up, or has leases."""
        return self.lookup is not None or (self.found is not None and bool(self.found.hits))

    def take(self, found: Found, block_tokens: int) -> None:
        """Take what a lookup found."""
        self.lookup, self.found = None, found
        if found.recipe is not None:
            if found.recipe != self.recipe or len(found.keys) > len(self.keys):
                self.recipe, self.keys = found.recipe, list(found.keys)
            self.stored = found.tokens // block_tokens

    def blocks(self, stored: Stored, wanted: range, pages: tuple[list[int], ...], *, none: int) -> Blocks:
        """The blocks that have these tokens, in the engine's pages.

        Args:
            stored: how the engine's layers lie in blocks.
            wanted: tokens, from a page's first on, to a block's last.
            pages: of the request, for each group of layers.
            none: the page that stands for none.
        """
        origin = wanted.start // stored.block_tokens * stored.block_tokens
        part = slice(origin // stored.page_tokens, wanted.stop // stored.page_tokens)
        return Blocks(
            self.recipe,
            tuple(self.keys[: wanted.stop // stored.block_tokens]),
            wanted.start,
            tuple(tuple(GONE if number == none else number for number in group[part]) for group in pages),
            origin,
        )

    def let_go(self) -> None:
        """Give back what is leased, or will be."""
        lookup, self.lookup = self.lookup, None
        if lookup is not None and not lookup.cancel():
            lookup.add_done_callback(lambda done: done.result().close())
        found, self.found = self.found, None
        if found is not None:
            found.close()
