"""Tokens of one layer that are held as they came, or rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.errors import CorruptPayload
from kvtier.flow.state import tensor
from kvtier.pruning.kept import Kept

Part = tuple[torch.Tensor, torch.Tensor]
"""K and V of a layer, `[kv_heads, tokens, dim]`."""


class Rows:
    """K and V `[kv_heads, columns, dim]`; heads that hold fewer tokens than others have them in the last columns.

    Attributes:
        parts: K and V, contiguous.
        tokens: of each KV head, int64 `[kv_heads]`.
    """

    def __init__(self, parts: Part) -> None:
        self.parts = parts
        heads, columns, _ = parts[0].shape
        self.tokens = np.full(heads, columns, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors' memory."""
        return sum(part.untyped_storage().nbytes() for part in self.parts)

    @property
    def even(self) -> bool:
        """All heads hold the same number of tokens."""
        return bool((self.tokens == self.parts[0].shape[1]).all())

    def append(self, new: Part) -> None:
        """Put tokens `[kv_heads, tokens, dim]` behind those that are there, in their dtype."""
        if new[0].shape[1]:
            self.parts = _pair(
                torch.cat([part, more.to(part.dtype)], 1) for part, more in zip(self.parts, new, strict=True)
            )
            self.tokens = self.tokens + new[0].shape[1]

    def first(self, count: int) -> Part:
        """A copy of the first columns."""
        return _pair(part[:, :count].clone() for part in self.parts)

    def drop_first(self, counts: NDArray[np.int64]) -> None:
        """Drop the oldest tokens of each head."""
        self.tokens = self.tokens - counts
        widest = int(self.tokens.max())
        self.parts = _pair(part[:, part.shape[1] - widest :].clone() for part in self.parts)

    def keep(self, stays: Sequence[NDArray[np.bool_]]) -> None:
        """Drop tokens: for each head one for each of its tokens, the oldest first."""
        if all(bool(each.all()) for each in stays):
            return
        width = self.parts[0].shape[1]
        columns = [np.flatnonzero(each) + width - len(each) for each in stays]
        self.tokens = np.array([len(each) for each in columns], np.int64)
        table = np.full((len(stays), int(self.tokens.max())), -1, np.int64)
        for row, each in zip(table, columns, strict=True):
            row[table.shape[1] - len(each) :] = each
        chosen = torch.from_numpy(table)
        if table.shape[1]:
            kept = Kept(chosen, chosen)
            self.parts = _pair(kept.gather(part) for part in self.parts)
        else:
            self.parts = _pair(part[:, :0].clone() for part in self.parts)

    def round(self, dtype: torch.dtype) -> None:
        """Go to another dtype."""
        self.parts = _pair(part.to(dtype) for part in self.parts)

    def state(self) -> dict[str, torch.Tensor]:
        """All of it; `take` makes it that again."""
        keys, values = self.parts
        return {"keys": keys, "values": values, "tokens": torch.from_numpy(self.tokens)}

    def take(self, state: Mapping[str, Any]) -> None:
        """Become what another's `state` says, whose heads and dtype are the same.

        Raises:
            CorruptPayload: it says no such thing.
        """
        heads, dtype = len(self.tokens), self.parts[0].dtype
        key, value = (each.shape[2] for each in self.parts)
        keys = tensor(state, "keys", dtype, heads, None, key)
        values = tensor(state, "values", dtype, heads, keys.shape[1], value)
        tokens = tensor(state, "tokens", torch.int64, heads).numpy()
        if tokens.min() < 0 or tokens.max() != keys.shape[1]:
            raise CorruptPayload(f"heads of {keys.shape[1]} columns have {tokens.tolist()} tokens")
        self.parts, self.tokens = (keys, values), tokens

    def copy_to(self, target: Part, begins: NDArray[np.int64]) -> None:
        """Copy the tokens of head h to the columns from `begins[h]` on."""
        columns = self.parts[0].shape[1]
        for part, to in zip(self.parts, target, strict=True):
            if self.even and (begins == begins[0]).all():
                to[:, int(begins[0]) : int(begins[0]) + columns] = part
            else:
                for head, (begin, count) in enumerate(zip(begins.tolist(), self.tokens.tolist(), strict=True)):
                    to[head, begin : begin + count] = part[head, columns - count :]


def _pair(parts: Iterable[torch.Tensor]) -> Part:
    keys, values = parts
    return keys, values
