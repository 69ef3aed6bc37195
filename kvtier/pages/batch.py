"""Sequences of one length side by side, as attention takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.errors import KVMismatch, UsageError
from kvtier.pages.kv import PagedKV
from kvtier.pages.tables import PageTable


class Batch:
    """Rows of one length in a pool: they grow together, are written and read layer by layer, and share what they can.

    Pages that follow each other are read in place, if there is only one row; others are copied together.

    Args:
        kv: the pool.
        rows: sequences of one length, which are the batch's from now on; none yet: see `start`.

    Attributes:
        kv: the pool.
        rows: the sequences, in order.
    """

    def __init__(self, kv: PagedKV, rows: Sequence[PageTable] = ()) -> None:
        if len({row.tokens for row in rows}) > 1:
            raise UsageError(f"the rows have {[row.tokens for row in rows]} tokens; pad or cut them to one length")
        self.kv, self.rows = kv, list(rows)
        self._pages: torch.Tensor | None = None
        self._places: torch.Tensor | None = None
        self._span, self._run = (0, 0), _run(self.rows)

    @property
    def tokens(self) -> int:
        """Length of every row."""
        return self.rows[0].tokens if self.rows else 0

    def start(self, rows: int) -> None:
        """Be this many empty rows."""
        self.close()
        self.rows = [self.kv.tables.new() for _ in range(rows)]
        self._look()

    def extend(self, tokens: int) -> None:
        """Make room for more tokens in every row.

        Raises:
            PoolFull: there is none; no row has grown.
        """
        self.kv.tables.extend((row, tokens) for row in self.rows)
        self._look()

    def check(self, parts: Sequence[torch.Tensor]) -> None:
        """Raise `KVMismatch` unless these are one layer's parts of all rows, each `[rows, kv_heads, tokens, dim]`."""
        self.kv.check(parts)
        if len(parts[0]) != len(self.rows):
            raise KVMismatch(
                f"{len(parts[0])} rows are written, and the batch has {len(self.rows)}; select() makes them as many"
            )

    def write(self, layer: int, first: int, parts: Sequence[torch.Tensor]) -> None:
        """Write one layer's parts, as for `check`, from token `first` on."""
        span = (first, first + parts[0].shape[2])
        if self._places is None or self._span != span:
            self._span, self._places = span, self.kv.places(self.rows, *span)
        self.kv.write(layer, self._places, parts)

    def read(self, layer: int, tokens: int) -> list[torch.Tensor]:
        """One layer's parts of the first tokens, each `[rows, kv_heads, tokens, dim]`, until the batch is changed."""
        if self._run is not None:
            parts = self.kv.look(layer, self._run)
        else:
            if self._pages is None:
                self._pages = self.kv.numbers([page for row in self.rows for page in row.pages])
            parts = self.kv.read(layer, self._pages, len(self.rows))
        return [part[:, :, :tokens] for part in parts]

    def fork(self) -> Batch:
        """Another batch with the same tokens; no byte is copied until one of them grows."""
        return Batch(self.kv, [self.kv.tables.fork(row) for row in self.rows])

    def select(self, indices: Sequence[int]) -> None:
        """Become these rows, each as often as it is named: a fork, whose pages are shared.

        Raises:
            UsageError: there is no such row.
        """
        outside = [index for index in indices if not -len(self.rows) <= index < len(self.rows)]
        if outside:
            raise UsageError(f"there is no row {outside[0]}; the batch has {len(self.rows)}")
        chosen = [self.kv.tables.fork(self.rows[index]) for index in indices]
        self.close()
        self.rows = chosen
        self._look()

    def cut(self, tokens: int) -> None:
        """Keep the first so many tokens of every row."""
        for row in self.rows:
            self.kv.tables.cut(row, tokens)
        self._look()

    def close(self) -> None:
        """Free the rows."""
        for row in self.rows:
            self.kv.tables.free(row)
        self.rows = []
        self._look()

    def _look(self) -> None:
        """See where the rows are now."""
        self._pages = self._places = None
        self._run = _run(self.rows)


def _run(rows: list[PageTable]) -> range | None:
    """The pages of a single row, if each is the one after the one before."""
    pages = rows[0].pages if len(rows) == 1 else ()
    if not pages:
        return None
    run = range(pages[0], pages[0] + len(pages))
    return run if tuple(run) == pages else None
