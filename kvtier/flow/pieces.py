"""Tokens of one layer that have aged: encoded once, and dropped without being decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.codecs.cpu.batch import Shape, Tables, arguments
from kvtier.codecs.cpu.decode import decode_blocks
from kvtier.codecs.cpu.drop import drop_tokens
from kvtier.codecs.cpu.encode import encode_blocks
from kvtier.codecs.layout import layout
from kvtier.codecs.plan import LayerPlan
from kvtier.codecs.scheme import Scheme
from kvtier.codecs.view import KVView
from kvtier.errors import ConfigError, CorruptPayload, UnsupportedKV
from kvtier.flow.state import tensor
from kvtier.spec import KVSpec

PIECE = 64
"""Tokens of a piece when it is encoded."""
AS_THEY_ARE = {"bfloat16": Scheme("bf16"), "float16": Scheme("fp16")}
"""What "raw" is in a piece: its rows can be read in another dtype."""


class PieceCodec:
    """Encodes pieces of `PIECE` tokens of one KV head, decodes them, and takes tokens out of them.

    A piece with n tokens left is laid out as a block of n tokens of one layer and head (`kvtier.codecs.layout`). Tokens
    that share a scale keep it, so that dropping some changes no bit of what the others decode to.

    Args:
        schemes: of K and of V.
        head_dims: of K and of V.
        held: dtype that is encoded: "bfloat16" or "float16".
        read: dtype that is decoded to.

    Attributes:
        read: spec of what is decoded.

    Raises:
        ConfigError: a scheme whose scales are not a token's, a channel's of a whole piece, or the piece's.
    """

    def __init__(self, schemes: Sequence[Scheme], head_dims: tuple[int, int], held: str, read: str) -> None:
        key, value = head_dims
        self.held = KVSpec(1, 1, key, held, v_head_dim=value, block_tokens=PIECE)
        self.read = replace(self.held, dtype=read)
        plan = (LayerPlan(tuple(_of_piece(scheme, held) for scheme in schemes), 0),)
        specs = [replace(self.held, block_tokens=tokens) for tokens in range(1, PIECE + 1)]
        self._tables = Tables([layout(plan, spec, first=False) for spec in specs])
        self._encoding, self._decoding = Shape(self.held), Shape(self.read)

    def nbytes(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of pieces with so many tokens."""
        return self._tables.nbytes[tokens - 1]

    def encode(self, kv: KVView, begins: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Encode the `PIECE` tokens from each of `begins`; the pieces, one after the other.

        Raises:
            UnsupportedKV: NaN, Inf or a scale that no float16 holds.
        """
        count, each = len(begins), int(self._tables.nbytes[-1])
        memory, stored = np.empty(count * each, np.uint8), np.empty(count, np.bool_)
        whole = np.full(count, PIECE - 1)
        call = arguments(self._encoding, self._tables, kv, (begins, np.arange(count) * each, whole), memory, range(1))
        encode_blocks(*call, False, stored)  # noqa: FBT003 kernels take no names
        if not stored.all():
            raise UnsupportedKV(
                "the KV has NaN, Inf or values that need a scale beyond float16; use a recipe with plan raw"
            )
        return memory

    def decode(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        tokens: NDArray[np.int64],
        kv: KVView,
        begins: NDArray[np.int64],
    ) -> None:
        """Decode pieces at `offsets` of `memory`, with so many `tokens`, into `kv` from `begins` on."""
        call = arguments(self._decoding, self._tables, kv, (begins, offsets, tokens - 1), memory, range(1))
        decode_blocks(*call, False)  # noqa: FBT003

    def drop(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        tokens: NDArray[np.int64],
        stays: NDArray[np.bool_],
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Take tokens out of pieces.

        Args:
            memory: where they are.
            offsets: of each.
            tokens: of each.
            stays: for each token of each piece, one after the other, whether it stays.

        Returns:
            The memory that they are in then, without gaps; where each is, and how many tokens are left of it. Pieces
            that nothing is left of have no bytes.
        """
        begins = np.cumsum(tokens) - tokens
        left = np.add.reduceat(stays, begins, dtype=np.int64) if len(tokens) else tokens
        nbytes = np.where(left > 0, self._tables.nbytes[left - 1], 0)
        places = np.cumsum(nbytes) - nbytes
        made = np.empty(int(nbytes.sum()), np.uint8)
        drop_tokens(
            (memory.ctypes.data, made.ctypes.data),
            (offsets, tokens - 1, places, left - 1),
            np.ascontiguousarray(stays),
            self._tables.table,
        )
        return made, places, left


@lru_cache(maxsize=64)
def codec_of(schemes: tuple[Scheme, ...], head_dims: tuple[int, int], held: str, read: str) -> PieceCodec:
    """The codec of these; layers that are stored alike have one."""
    return PieceCodec(schemes, head_dims, held, read)


class Pieces:
    """The pieces of one layer, in one buffer without gaps.

    Attributes:
        tokens: of each KV head, int64 `[kv_heads]`.
    """

    def __init__(self, codec: PieceCodec, heads: int) -> None:
        self._codec = codec
        self._memory = np.empty(0, np.uint8)
        # Of each piece; those of a head after those of the heads before, the oldest first.
        self._heads = self._counts = self._offsets = np.empty(0, np.int64)
        self.tokens = np.zeros(heads, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._memory.nbytes

    def add(self, parts: Sequence[torch.Tensor], heads: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        """Encode the `PIECE` tokens from each of `columns` on of K and V `[kv_heads, tokens, dim]`, contiguous.

        Raises:
            UnsupportedKV: they cannot be encoded; nothing is added.
        """
        width = parts[0].shape[1]
        made = self._codec.encode(_one_head(parts, self._codec.held), heads * width + columns)
        offsets = len(self._memory) + np.arange(len(heads)) * (len(made) // len(heads))
        self._memory = np.concatenate([self._memory, made])
        self._index(
            np.concatenate([self._heads, heads]),
            np.concatenate([self._counts, np.full(len(heads), PIECE)]),
            np.concatenate([self._offsets, offsets]),
        )

    def read(self, kv: KVView, begins: NDArray[np.int64]) -> None:
        """Decode everything; the tokens of head h from `begins[h]` of `kv` on."""
        if len(self._counts):
            places = begins[self._heads] + self._starts
            self._codec.decode(self._memory, self._offsets, self._counts, kv, places)

    def keep(self, stays: NDArray[np.bool_]) -> None:
        """Drop tokens: `stays` has one for each token, heads one after the other, the oldest first."""
        if stays.all():
            return
        self._memory, offsets, left = self._codec.drop(self._memory, self._offsets, self._counts, stays)
        some = left > 0
        self._index(self._heads[some], left[some], offsets[some])

    def state(self) -> dict[str, torch.Tensor]:
        """All of it; `take` makes it that again."""
        arrays = {"memory": self._memory, "heads": self._heads, "counts": self._counts, "offsets": self._offsets}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def take(self, state: Mapping[str, Any]) -> None:
        """Become what another's `state` says, of as many heads and the same codec.

        Raises:
            CorruptPayload: it says no such thing.
        """
        memory = tensor(state, "memory", torch.uint8, None).numpy()
        heads = tensor(state, "heads", torch.int64, None).numpy()
        counts, offsets = (tensor(state, name, torch.int64, len(heads)).numpy() for name in ("counts", "offsets"))
        known = ((heads >= 0) & (heads < len(self.tokens)) & (counts > 0) & (counts <= PIECE)).all()
        ends = self._codec.nbytes(counts) if known else counts
        if not known or ends.sum() != len(memory) or ((offsets < 0) | (offsets > len(memory) - ends)).any():
            raise CorruptPayload(f"{len(heads)} pieces are not in {len(memory)} bytes")
        self._memory = memory
        self._index(heads, counts, offsets)

    def _index(self, heads: NDArray[np.int64], counts: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        order = np.argsort(heads, kind="stable")
        self._heads, self._counts, self._offsets = heads[order], counts[order], offsets[order]
        self.tokens = np.bincount(self._heads, self._counts, len(self.tokens)).astype(np.int64)
        before = np.cumsum(self._counts) - self._counts
        self._starts = before - (np.cumsum(self.tokens) - self.tokens)[self._heads]


def _one_head(parts: Sequence[torch.Tensor], spec: KVSpec) -> KVView:
    """K and V `[kv_heads, tokens, dim]` as one head's, the tokens of a head after those of the one before."""
    return KVView.of([tuple(part.view(-1, 1, part.shape[2]) for part in parts)], spec)


def _of_piece(scheme: Scheme, held: str) -> Scheme:
    if scheme.precision == "raw":
        return AS_THEY_ARE[held]
    if scheme.granularity == "channel" and scheme.group < PIECE:
        raise ConfigError(
            f"{scheme}: the {PIECE} tokens that age together share the scale of a channel; write "
            f"{scheme.precision}/channel:{PIECE}"
        )
    return scheme
