"""SGLang's host pools, as rows."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.client.rows import RowMemory
from kvtier.errors import ConfigError, UsageError


@dataclass(frozen=True, slots=True)
class HostPool:
    """One host pool: where its pages are, and how their bytes are meant.

    Attributes:
        memory: its pages, as SGLang's zero-copy interface describes them; None where pages come one by one, flat.
        page_tokens: token slots of a page.
        nbytes: bytes of a page.
        layout: for the keyspace.
        sharded: whether tensor-parallel ranks have different bytes even where the model's KV is the same on all.
    """

    memory: RowMemory | None
    page_tokens: int
    nbytes: int
    layout: str
    sharded: bool

    @classmethod
    def of(cls, pool: Any, *, flat: bool, dtype: str) -> HostPool:
        """Look at one of SGLang's pools.

        Args:
            pool: a `HostKVCache`.
            flat: whether its pages come one by one.
            dtype: of the KV, where the pool's own dtype does not say it.

        Raises:
            ConfigError: its pages do not lie in memory that can be described, or nobody says what is in them.
        """
        kind = f"{type(pool).__name__} {pool.layout}"
        stored = str(pool.dtype).removeprefix("torch.")
        if stored.startswith(("uint", "int")) and not dtype:
            raise ConfigError(
                f"SGLang's pool ({kind}) has pages of {stored}, which do not say what they hold; add kv_cache_dtype "
                "with what --kv-cache-dtype was given"
            )
        page = int(getattr(pool, "page_size", 1) or 1)
        memory = None if flat else _memory(pool, page)
        nbytes = _flat_nbytes(pool) if memory is None else memory.piece_nbytes * len(memory.pieces)
        layers = f"{getattr(pool, 'start_layer', '')}:{getattr(pool, 'end_layer', '')}"
        layers += f"+{pool.layer_num - getattr(pool, 'target_layer_num', pool.layer_num)}"
        said = f"opaque:sglang {importlib.metadata.version('sglang')} {kind} {'flat' if flat else 'pieces'} page {page}"
        layout = f"{said} {stored} {dtype} layers {layers}"
        return cls(memory, page, nbytes, layout, hasattr(pool, "head_num"))

    def rows(self, indices: Any, count: int) -> NDArray[np.int64]:
        """Which of the memory's rows these token slots are.

        Raises:
            UsageError: they are not `count` whole pages.
        """
        try:
            slots = np.asarray(indices.cpu() if hasattr(indices, "cpu") else indices, np.int64)
        except (TypeError, ValueError) as exc:
            raise UsageError(f"token slots are {indices!r}; pass integers") from exc
        if slots.shape != (count * self.page_tokens,):
            raise UsageError(f"token slots {list(slots.shape)} for {count} pages of {self.page_tokens}")
        by_page = slots.reshape(count, self.page_tokens)
        if (by_page[:, :1] % self.page_tokens).any() or (by_page - by_page[:, :1] != np.arange(self.page_tokens)).any():
            raise UsageError("token slots that are not whole pages, one after the other")
        pages: NDArray[np.int64] = by_page[:, 0] // self.page_tokens
        return pages

    def flat(self, pages: Sequence[Any]) -> tuple[RowMemory, NDArray[np.int64]]:
        """Tensors with one page each, and which rows of their memory they are.

        Raises:
            UsageError: one that is no page of this pool.
        """
        for page in pages:
            if not hasattr(page, "data_ptr"):
                raise UsageError(f"a page is {type(page).__name__}; pass a tensor of {self.nbytes} bytes")
            if page.device.type != "cpu" or not page.is_contiguous() or page.nbytes != self.nbytes:
                raise UsageError(
                    f"a page of {page.nbytes} bytes on {page.device}; pages of this pool are contiguous in CPU memory "
                    f"and have {self.nbytes}"
                )
        return RowMemory.apart([page.data_ptr() for page in pages], self.nbytes, list(pages))


def _memory(pool: Any, page: int) -> RowMemory:
    """Ask the pool where three of its pages are: that all lie at equal distances is then known, and not assumed."""
    import torch

    try:
        count = int(pool.page_num)
        asked = (0, min(1, count - 1), count - 1)
        slots = torch.cat([torch.arange(at * page, (at + 1) * page) for at in asked])
        pointers, sizes = pool.get_page_buffer_meta(slots)
    except (AttributeError, TypeError, ValueError, NotImplementedError) as exc:
        raise ConfigError(
            f"SGLang's pool ({type(pool).__name__} {pool.layout}) does not say where its pages are ({exc}); use "
            "--hicache-mem-layout page_first, or interface_v1: 0"
        ) from exc
    begins, nbytes = np.array(pointers, np.int64).reshape(3, -1), np.array(sizes, np.int64).reshape(3, -1)
    strides = begins[1] - begins[0]
    if (begins[2] != begins[0] + (count - 1) * strides).any() or (nbytes != nbytes[0]).any():
        raise ConfigError(
            f"SGLang's pool ({type(pool).__name__} {pool.layout}) has pages at unequal distances; set interface_v1: 0"
        )
    return RowMemory.scattered(begins[0].tolist(), nbytes[0].tolist(), strides.tolist(), count, pool)


def _flat_nbytes(pool: Any) -> int:
    try:
        page = pool.get_dummy_flat_data_page()
    except (ValueError, NotImplementedError) as exc:
        raise ConfigError(
            f"SGLang's pool ({type(pool).__name__} {pool.layout}) has no flat pages ({exc}); set interface_v1: 1"
        ) from exc
    return int(page.numel() * page.element_size())
