"""Between a worker's pages and the host's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvtier.client.hit import Hit
from kvtier.client.save import Saved
from kvtier.connectors.vllm.link import Link
from kvtier.connectors.vllm.lookup import chain_of
from kvtier.connectors.vllm.messages import GONE, Blocks
from kvtier.connectors.vllm.pages import Pages
from kvtier.connectors.vllm.stored import Stored

LAYERS = 4
"""Loaded at a time when the engine waits for each layer."""
PIECE = 16
"""Blocks of a hybrid model that are copied at a time."""


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
        with self.pages.beside(), space.match(chain_of(space, blocks.keys), again=True) as hit:
            if self._stored.hybrid:
                return self._load_by_group(hit, blocks)
            origin = blocks.origin
            if origin < blocks.start and (origin := self._load_rest(hit, blocks)) < blocks.start:
                return blocks.start
            good = end = self._end(blocks)
            view = self.pages.view(blocks.pages[0][(origin - blocks.origin) // self._stored.page_tokens :])
            for layers in self._ranges(whole=there is None):
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
        chain, saved = chain_of(space, blocks.keys), Saved(0, 0)
        for start, (pool, pages) in self._gathered(blocks):
            part = chain.upto(start + len(pages) * self._stored.page_tokens, self._stored.block_tokens)
            with self.pages.beside():
                one = space.save(part, pool.view(pages), start=start, origin=start, vouched=True).result()
            saved = Saved(saved.blocks + one.blocks, saved.present + one.present, one.refused)
            if one.refused:
                break
        return saved

    def _load_rest(self, hit: Hit, blocks: Blocks) -> int:
        """Load the block of which the engine has some pages already; where the next one begins, or the block itself."""
        step, page = self._stored.block_tokens, self._stored.page_tokens
        had, several = (blocks.start - blocks.origin) // page, step // page
        scratch = self.pages.scratch(several)
        if hit.load(scratch.view(range(several)), verify=self._verify, origin=blocks.origin) < blocks.origin + step:
            return blocks.origin
        with self.pages.beside():  # done when this is left: it may be all that there is to load, and the step reads it
            self.pages.copy(scratch, range(had, several), blocks.pages[0][had:several])
        return blocks.origin + step

    def _load_by_group(self, hit: Hit, blocks: Blocks) -> int:
        """Load a hybrid model's blocks: of each group the pages that it wants, through pages of our own."""
        page, end = self._stored.page_tokens, self._end(blocks)
        for origin in range(blocks.origin, end, PIECE * self._stored.block_tokens):
            stop = min(end, origin + PIECE * self._stored.block_tokens)
            tokens = range(origin, stop, page)
            scratch = self.pages.scratch(len(tokens))
            view = scratch.view(range(len(tokens)))
            for group, layers in self._stored.runs:
                theirs = blocks.pages[group][(origin - blocks.origin) // page :]
                wanted = [i for i, at in enumerate(tokens) if at >= blocks.start and theirs[i] != GONE]
                if not wanted:
                    continue
                if hit.load(view, layers=layers, verify=self._verify, origin=origin) < stop:
                    return max(blocks.start, origin)
                self.pages.copy(scratch, wanted, [theirs[i] for i in wanted], layers=layers)
        return end

    def _gathered(self, blocks: Blocks) -> Iterator[tuple[int, tuple[Pages, Sequence[int]]]]:
        """Pages that hold whole blocks, and their first token: the engine's own, or copies of a hybrid model's."""
        if not self._stored.hybrid:
            yield blocks.start, (self.pages, blocks.pages[0])
            return
        page, each = self._stored.page_tokens, PIECE * self._stored.block_tokens // self._stored.page_tokens
        for at in range(0, len(blocks.pages[0]), each):
            several = range(len(blocks.pages[0][at : at + each]))
            scratch = self.pages.scratch(len(several))
            with self.pages.beside():
                for group, layers in self._stored.runs:
                    scratch.copy(self.pages, blocks.pages[group][at : at + each], several, layers=layers)
            yield blocks.start + at * page, (scratch, several)

    def _end(self, blocks: Blocks) -> int:
        return len(blocks.keys) * self._stored.block_tokens

    def _ranges(self, *, whole: bool) -> list[range]:
        """All layers, or some at a time."""
        layers = self._stored.spec.layers
        most = layers if whole else LAYERS
        return [range(at, min(at + most, layers)) for at in range(0, layers, most)]
