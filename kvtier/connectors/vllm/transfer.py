"""Between a worker's pages and the host's blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvtier.client.hit import Hit
from kvtier.client.save import Saved
from kvtier.connectors.vllm.link import Link
from kvtier.connectors.vllm.lookup import chain_of
from kvtier.connectors.vllm.messages import Blocks
from kvtier.connectors.vllm.pages import Pages
from kvtier.connectors.vllm.stored import Stored

LAYERS = 4
"""Loaded at a time when the engine waits for each layer."""


class Transfer:
    """Loads blocks into an engine's pages, and saves them from there. Thread-safe.

    Args:
        stored: how the layers lie in blocks.
        pools: the engine's tensor of each layer, by name.
        rank: of this worker among those whose KV differs.
        link: to the host.
        verify: whether each load verifies checksums.
    """

    def __init__(
        self, stored: Stored, pools: Mapping[str, Any], *, rank: int, link: Link, verify: bool = False
    ) -> None:
        self._stored, self._rank, self._link, self._verify = stored, rank, link, verify
        self.pages = Pages([pools[name] for name in stored.names], stored.spec, opaque=stored.opaque)

    def load(self, blocks: Blocks, there: Callable[[range], None] | None = None) -> int:
        """Load blocks; the token up to which all of them are loaded and verified.

        Args:
            blocks: whose pages from token `start` on are written to; those before are others' too.
            there: called with each range of layers that has been tried.
        """
        space = None if blocks.recipe is None else self._link.space(blocks.recipe, self._rank)
        if space is None:
            return blocks.start
        with space.match(chain_of(space, blocks.keys), again=True) as hit:
            origin = blocks.origin
            if origin < blocks.start:
                origin = self._first(hit, blocks)
                if origin < blocks.start:
                    return blocks.start
            good = end = len(blocks.keys) * self._stored.block_tokens
            view = self.pages.view(blocks.pages[(origin - blocks.origin) // self._stored.page_tokens :])
            for layers in _ranges(self._stored.spec.layers, LAYERS if there is not None else self._stored.spec.layers):
                if origin < end:
                    good = min(good, hit.load(view, layers=layers, verify=self._verify, origin=origin))
                if there is not None:
                    there(layers)
        return max(good, blocks.start)

    def save(self, blocks: Blocks) -> Saved:
        """Save blocks, and wait until that is done."""
        space = None if blocks.recipe is None else self._link.space(blocks.recipe, self._rank)
        if space is None:
            return Saved(0, 0, "unavailable")
        view = self.pages.view(blocks.pages)
        chain = chain_of(space, blocks.keys)
        return space.save(chain, view, start=blocks.start, origin=blocks.origin, vouched=True).result()

    def _first(self, hit: Hit, blocks: Blocks) -> int:
        """Load the block of which the engine has some pages already; where the next one begins, or the block itself."""
        step, page = self._stored.block_tokens, self._stored.page_tokens
        had, several = (blocks.start - blocks.origin) // page, step // page
        scratch = self.pages.scratch(several)
        if hit.load(scratch.view(range(several)), verify=self._verify, origin=blocks.origin) < blocks.origin + step:
            return blocks.origin
        self.pages.copy(scratch, range(had, several), blocks.pages[had:several])
        return blocks.origin + step


def _ranges(layers: int, most: int) -> list[range]:
    return [range(at, min(at + most, layers)) for at in range(0, layers, most)]
