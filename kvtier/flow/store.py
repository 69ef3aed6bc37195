"""The KV of one layer of one sequence, smaller the older it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.codecs.view import KVView
from kvtier.flow.pieces import PIECE, PieceCodec, Pieces
from kvtier.flow.rows import Part, Rows
from kvtier.flow.state import part
from kvtier.pruning.kept import Kept
from kvtier.spec import KVSpec

STEP = 256
"""Tokens that a scratch grows by."""


class Scratch:
    """Room for the KV of one layer while it is read; shared by all layers, so what is read is there until the next.

    Args:
        heads: KV heads.
        spec: of one head, in the dtype that is read.
    """

    def __init__(self, heads: int, spec: KVSpec) -> None:
        self.heads, self.spec = heads, spec
        self._dtype = getattr(torch, spec.dtype)
        self._room = 0
        self._flat: tuple[torch.Tensor, ...] = ()
        self._shown: tuple[int, Part, KVView] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return sum(part.untyped_storage().nbytes() for part in self._flat)

    def room(self, tokens: int) -> tuple[Part, KVView]:
        """K and V `[kv_heads, tokens, dim]`, and the same as one head's, a head's tokens after the other's."""
        if self._shown is None or self._shown[0] != tokens:
            if tokens > self._room:
                self._room = -(-tokens // STEP) * STEP
                self._flat = ()
                self._flat = tuple(
                    torch.empty(self.heads * self._room * dim, dtype=self._dtype) for dim in self.spec.head_dims
                )
            keys, values = (
                flat[: self.heads * tokens * dim].view(self.heads, tokens, dim)
                for flat, dim in zip(self._flat, self.spec.head_dims, strict=True)
            )
            view = KVView.of([tuple(part.view(-1, 1, part.shape[2]) for part in (keys, values))], self.spec)
            self._shown = tokens, (keys, values), view
        return self._shown[1], self._shown[2]


class Store:
    """One layer of one sequence.

        | exact | aged: pieces of up to 64 tokens of one head, encoded once | recent: 16 bits | <- tokens come here

    While the prompt is computed everything is as it came; `settle` ends that. From then on tokens leave the recent
    ones 64 at a time, head by head. A store without a codec keeps everything in 16 bits.

    Args:
        scratch: what it is read into.
        codec: of what has aged; None to keep all in 16 bits.
        held: 16-bit dtype of what has not aged.
        exact: first tokens of the sequence that do not age.
        recent: youngest tokens of a head that do not age: a number, or a share of what it holds.
    """

    def __init__(
        self, scratch: Scratch, codec: PieceCodec | None, held: torch.dtype, *, exact: int, recent: float
    ) -> None:
        self._scratch, self._held = scratch, held
        self._exact, self._recent = exact, recent
        dims, dtype = scratch.spec.head_dims, getattr(torch, scratch.spec.dtype)
        keys, values = (torch.empty(scratch.heads, 0, dim, dtype=dtype) for dim in dims)
        self.settled = False
        self.recent = Rows((keys, values))
        self.exact = Rows((keys.to(held), values.to(held)))
        self.aged = None if codec is None else Pieces(codec, scratch.heads)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Held of each KV head, `[kv_heads]`."""
        aged = 0 if self.aged is None else self.aged.tokens
        return self.exact.tokens + aged + self.recent.tokens

    @property
    def columns(self) -> int:
        """Of what `read` gives: tokens of the head that holds most."""
        return int(self.tokens.max())

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the memory of each region."""
        aged = 0 if self.aged is None else self.aged.nbytes
        return {"exact": self.exact.nbytes, "aged": aged, "recent": self.recent.nbytes}

    def append(self, new: Part) -> Part:
        """Take tokens `[kv_heads, tokens, dim]`; everything that is held then, and these as they were given.

        Returns:
            As `read`.
        """
        if not self.settled and not self.columns:
            self.recent = Rows((new[0].contiguous(), new[1].contiguous()))
            return self.recent.parts
        self.recent.append(new)
        parts = self.read()
        if parts[0].dtype != self.recent.parts[0].dtype:
            for part, more in zip(parts, new, strict=True):
                part[:, part.shape[1] - more.shape[1] :] = more
        return parts

    def read(self) -> Part:
        """Everything, K and V `[kv_heads, columns, dim]`, in the scratch or where it lies: until the next is read.

        Heads that hold fewer tokens than others have zeros in front.
        """
        rows = self.recent
        alone = not self.exact.tokens.any() and (self.aged is None or not self.aged.tokens.any())
        if alone and rows.parts[0].dtype == getattr(torch, self._scratch.spec.dtype):
            return rows.parts
        width = self.columns
        (keys, values), view = self._scratch.room(width)
        target, pads = (keys, values), width - self.tokens
        if rows.parts[0].shape[1]:
            for part, to in zip(rows.parts, target, strict=True):
                to[:, width - part.shape[1] :] = part
        if self.aged is not None:
            self.aged.read(view, np.arange(len(pads)) * width + pads + self.exact.tokens)
        self.exact.copy_to(target, pads)
        for head in np.flatnonzero(pads):
            keys[head, : pads[head]] = 0
            values[head, : pads[head]] = 0
        return target

    def keep(self, kept: Kept) -> None:
        """Drop all but some of the columns that `read` gives."""
        width = self.columns
        stays = []
        for row, count in zip(kept.columns.cpu().numpy(), self.tokens.tolist(), strict=True):
            of_head = np.zeros(count, np.bool_)
            of_head[row[row >= 0] - (width - count)] = True
            stays.append(of_head)
        after_exact = self.exact.tokens
        after_aged = after_exact + (0 if self.aged is None else self.aged.tokens)
        self.recent.keep([each[end:] for each, end in zip(stays, after_aged, strict=True)])
        if self.aged is not None:
            between = [each[a:b] for each, a, b in zip(stays, after_exact, after_aged, strict=True)]
            self.aged.keep(np.concatenate(between))
        self.exact.keep([each[:end] for each, end in zip(stays, after_exact, strict=True)])

    def settle(self, kept: Kept | None = None) -> None:
        """The prompt is computed: from now on nothing is held as it came. Drops all but `kept` before anything ages.

        Raises:
            UnsupportedKV: what is to age has NaN or Inf.
        """
        if self.settled:
            return
        if self.aged is not None and self._exact:
            first = min(self._exact, self.recent.parts[0].shape[1])
            self.exact = Rows(self.recent.first(first))
            self.exact.round(self._held)
            self.recent.drop_first(np.full(self._scratch.heads, first))
        if kept is not None:
            self.keep(kept)
        self.recent.round(self._held)
        self.settled = True
        self.age()

    def state(self) -> dict[str, Any]:
        """All of it, once it is settled; `take` makes it that again."""
        aged = {} if self.aged is None else self.aged.state()
        return {"exact": self.exact.state(), "aged": aged, "recent": self.recent.state()}

    def take(self, state: Mapping[str, Any]) -> None:
        """Become what the `state` of a store under the same recipe says.

        Raises:
            CorruptPayload: it says no such thing.
        """
        self.recent.round(self._held)
        self.exact.take(part(state, "exact"))
        self.recent.take(part(state, "recent"))
        if self.aged is not None:
            self.aged.take(part(state, "aged"))
        self.settled = True

    def age(self) -> None:
        """Encode tokens that are old enough, by whole pieces.

        Raises:
            UnsupportedKV: they have NaN or Inf; they stay as they are.
        """
        if self.aged is None or not self.settled:
            return
        share = isinstance(self._recent, float)
        young = np.array([math.ceil(self._recent * count) for count in self.tokens]) if share else int(self._recent)
        pieces = (self.recent.tokens - young).clip(0) // PIECE
        if not pieces.any():
            return
        heads = np.repeat(np.arange(len(pieces)), pieces)
        number = np.arange(len(heads)) - (np.cumsum(pieces) - pieces)[heads]
        begins = self.recent.parts[0].shape[1] - self.recent.tokens
        self.aged.add(self.recent.parts, heads, begins[heads] + number * PIECE)
        self.recent.drop_first(pieces * PIECE)
