"""A cache of transformers whose KV lies in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvtier.connectors.transformers.storable import spec_for
from kvtier.errors import ConfigError
from kvtier.pages import PAGE_TOKENS, Batch, PagedKV, PageTable


def pages_for(model: Any, *, memory: int, page_tokens: int = PAGE_TOKENS, block_tokens: int = 64) -> PagedKV:
    """Make a pool of pages for a model, where the model is.

    Args:
        model: a decoder-only model for causal language modelling.
        memory: bytes.
        page_tokens: tokens in a page.
        block_tokens: tokens in a block of the spaces that its KV is saved to.

    Raises:
        UnsupportedKV: not every layer keeps one K and V for every token.
        ConfigError: the memory does not hold a page.
    """
    spec = spec_for(model, block_tokens=block_tokens)
    count = memory // (spec.token_nbytes * page_tokens)
    if count < 1:
        raise ConfigError(
            f"{memory} bytes hold no page of {page_tokens} tokens; give at least {spec.token_nbytes * page_tokens}"
        )
    return PagedKV(spec, count, page_tokens=page_tokens, device=model.device)


class PagedCache(Cache):
    """KV of a batch in a pool of pages, in place of a DynamicCache.

    Beams that branch off, rows that are repeated and copies of the cache share pages. For inference: no gradient passes
    through it. One thread at a time.

    Args:
        kv: the pool; see `pages_for`.
        rows: sequences of one length that the cache goes on with, and has from now on; none unless given.

    Attributes:
        batch: the rows in the pool.

    Raises:
        PoolFull: (in the model's forward) there are not enough free pages; the cache is as it was.
    """

    def __init__(self, kv: PagedKV, rows: Sequence[PageTable] = ()) -> None:
        self.batch = Batch(kv, rows)
        self._own = [PagedLayer(self.batch, number) for number in range(kv.spec.layers)]
        super().__init__(layers=[*self._own])

    @property
    def rows(self) -> list[PageTable]:
        """The sequences."""
        return self.batch.rows

    def fork(self, times: int = 1) -> PagedCache:
        """Another cache with the same tokens, each row so many times; it shares all pages."""
        tables = self.batch.kv.tables
        made = PagedCache(self.batch.kv, [tables.fork(row) for row in self.batch.rows for _ in range(times)])
        for layer, mine in zip(made._own, self._own, strict=True):
            layer.tokens = mine.tokens
        return made

    def close(self) -> None:
        """Give back the pages that nobody else has; the cache is empty then. One that is dropped does so, too."""
        self.reset()

    def reset(self) -> None:
        self.batch.close()
        for layer in self._own:
            layer.tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.batch.cut(max(layer.tokens for layer in self._own))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch.select([row for row in range(len(self.batch.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.batch.select(torch.arange(len(self.batch.rows))[indices.cpu()].tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        return self.fork()


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `PagedCache`.

    Attributes:
        tokens: of each row that this layer has written.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, batch: Batch, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._batch, self._number = batch, number
        self.tokens, self.is_initialized = batch.tokens, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, first = self._batch, self.tokens
        if not batch.rows:
            batch.start(len(key_states))
        batch.check((key_states, value_states))
        end = first + key_states.shape[2]
        if end > batch.tokens:
            batch.extend(end - batch.tokens)
        batch.write(self._number, first, (key_states, value_states))
        self.tokens = end
        keys, values = batch.read(self._number, end)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number, of tokens to remove")
        self.tokens = max(0, self.tokens + tokens_to_remove)
