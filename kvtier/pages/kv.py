"""The KV of many sequences in one pool of pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvtier.errors import KVMismatch, UsageError
from kvtier.pages.tables import PageTable, PageTables
from kvtier.spec import KVSpec

PAGE_TOKENS = 16


class PagedKV:
    """Memory for the KV of so many pages, allocated once, and the page tables over it.

    In memory a part of a layer is `[kv_heads, pages, page_tokens, dim]`: a head's tokens are contiguous as long as
    pages follow each other, as attention wants them. Codecs and other readers see `pools`, by strides.

    Work on a device is queued on the current stream; take the same one for all of a pool's sequences.

    Args:
        spec: of the KV.
        count: pages.
        page_tokens: tokens in a page.
        device: where.

    Attributes:
        tables: makes, forks, grows, cuts and frees sequences.
        pools: for each layer what `KVView.paged` and `DeviceView.paged` take: K and V as
            `[pages, page_tokens, kv_heads, dim]` (MLA: one `[pages, page_tokens, head_dim]`), views of the memory.

    Raises:
        ConfigError: no pages, or pages of no tokens.
    """

    def __init__(self, spec: KVSpec, count: int, *, page_tokens: int = PAGE_TOKENS, device: Any = "cpu") -> None:
        self.spec, self.page_tokens, self.device = spec, page_tokens, torch.device(device)
        self.tables = PageTables(count, page_tokens, self._copy)
        dtype, heads = getattr(torch, spec.dtype), spec.kv_heads
        with torch.inference_mode(mode=False):  # what is made in inference mode can only be written in it
            self._parts = [
                [torch.empty(heads, count, page_tokens, dim, dtype=dtype, device=self.device) for dim in spec.head_dims]
                for _ in range(spec.layers)
            ]
        seen = [[part.permute(1, 2, 0, 3) for part in layer] for layer in self._parts]
        self.pools: list[Any] = [layer[0][:, :, 0] if spec.mla else tuple(layer) for layer in seen]

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.spec.token_nbytes * self.page_tokens

    @property
    def held_nbytes(self) -> int:
        """Bytes of the pages that some sequence has, each counted once."""
        return (self.tables.count - self.tables.free_pages) * self.page_nbytes

    def append(self, table: PageTable, kv: Sequence[Any]) -> None:
        """Add tokens to a sequence.

        Args:
            table: which one.
            kv: for each layer K and V as `[tokens, kv_heads, dim]` (MLA: one `[tokens, head_dim]`); or one tensor
                `[layers, 2, tokens, kv_heads, head_dim]` (MLA: `[layers, tokens, head_dim]`).

        Raises:
            KVMismatch: another shape or dtype than the spec says.
            PoolFull: there is no room; nothing is added.
        """
        layers = [[part.unsqueeze(1) for part in (layer,)] if self.spec.mla else list(layer) for layer in kv]
        sizes = {part.shape[0] for layer in layers for part in layer}
        if len(layers) != self.spec.layers or len(sizes) != 1:
            raise KVMismatch(f"{len(layers)} layers of {sorted(sizes)} tokens; pass {self.spec.layers} of one length")
        rows = [[part.transpose(0, 1)[None] for part in layer] for layer in layers]
        for layer in rows:
            self.check(layer)
        first = table.tokens
        self.tables.extend([(table, sizes.pop())])
        places = self.places([table], first, table.tokens)
        for number, layer in enumerate(rows):
            self.write(number, places, layer)

    def gather(self, table: PageTable) -> list[tuple[torch.Tensor, ...]]:
        """A copy of a sequence's KV: for each layer its parts as `[tokens, kv_heads, dim]`."""
        pages = self.numbers(table.pages)
        return [
            tuple(part.index_select(1, pages).flatten(1, 2)[:, : table.tokens].transpose(0, 1) for part in layer)
            for layer in self._parts
        ]

    def check(self, parts: Sequence[torch.Tensor]) -> None:
        """Raise `KVMismatch` unless these are one layer's parts, each `[rows, kv_heads, tokens, dim]`."""
        spec = self.spec
        wants = [(spec.kv_heads, dim, getattr(torch, spec.dtype)) for dim in spec.head_dims]
        found = [(part.shape[1], part.shape[3], part.dtype) if part.ndim == 4 else None for part in parts]
        if found != wants or len({part.shape[::2] for part in parts}) != 1:
            shapes = [(list(part.shape), str(part.dtype).removeprefix("torch.")) for part in parts]
            raise KVMismatch(f"a layer's parts are {shapes}; the pool is of {spec}")

    def places(self, tables: Sequence[PageTable], first: int, end: int) -> torch.Tensor:
        """Where tokens `[first, end)` of these sequences lie, one sequence behind the other: for `write`."""
        if any(end > table.tokens for table in tables):
            raise UsageError(f"not all of these sequences have {end} tokens; extend() them first")
        size = self.page_tokens
        pages = torch.tensor([table.pages[first // size : -(-end // size)] for table in tables], dtype=torch.int64)
        tokens = pages[:, :, None] * size + torch.arange(size)
        skipped = first % size
        return tokens.flatten(1)[:, skipped : skipped + end - first].flatten().to(self.device)

    def numbers(self, pages: Sequence[int]) -> torch.Tensor:
        """Numbers of pages where the memory is: for `read`."""
        return torch.tensor(pages, dtype=torch.int64, device=self.device)

    def write(self, layer: int, places: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Put one layer's parts, each `[rows, kv_heads, tokens, dim]`, to these places."""
        for memory, part in zip(self._parts[layer], parts, strict=True):
            memory.flatten(1, 2).index_copy_(1, places, part.detach().transpose(0, 1).flatten(1, 2).to(self.device))

    def read(self, layer: int, pages: torch.Tensor, rows: int) -> list[torch.Tensor]:
        """A copy of one layer's parts of some pages, row after row: each `[rows, kv_heads, tokens, dim]`."""
        return [
            memory.index_select(1, pages).unflatten(1, (rows, -1)).flatten(2, 3).transpose(0, 1)
            for memory in self._parts[layer]
        ]

    def look(self, layer: int, pages: range) -> list[torch.Tensor]:
        """One layer's parts of pages that follow each other, in place: `[1, kv_heads, tokens, dim]`."""
        return [memory[None, :, pages.start : pages.stop].flatten(2, 3) for memory in self._parts[layer]]

    def _copy(self, source: int, target: int, tokens: int) -> None:
        for layer in self._parts:
            for memory in layer:
                memory[:, target, :tokens] = memory[:, source, :tokens]
