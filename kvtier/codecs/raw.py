"""Bytes as they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier.codecs.batch import STREAMING_NBYTES, arguments
from kvtier.codecs.intrinsics import STREAMS
from kvtier.codecs.raw_kernel import LOAD, STORE, copy_blocks
from kvtier.codecs.view import KVView
from kvtier.errors import UsageError
from kvtier.spec import KVSpec


class RawCodec:
    """The elements themselves, whatever their bits.

    A layer is K `[block_tokens, kv_heads, head_dim]`, then V `[block_tokens, kv_heads, v_head_dim]` (MLA: the latent
    alone), contiguous, little-endian, without padding.
    """

    number = 1
    plan = "raw"

    def layer_nbytes(self, spec: KVSpec, position: int) -> int:
        return spec.block_nbytes // spec.layers

    def nbytes(self, spec: KVSpec, position: int) -> int:
        return spec.block_nbytes

    def encode(
        self,
        spec: KVSpec,
        kv: KVView,
        tokens: NDArray[np.int64],
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        layers: range,
    ) -> NDArray[np.bool_]:
        if not memory.flags.writeable:
            raise UsageError("memory is read-only; blocks are encoded into a writable map")
        call = arguments(spec, spec.block_nbytes // spec.layers, kv, tokens, memory, offsets, layers=layers)
        copy_blocks(*call, STORE, _streaming(spec, len(tokens), layers))
        return np.ones(len(tokens), np.bool_)

    def decode(
        self,
        spec: KVSpec,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        kv: KVView,
        tokens: NDArray[np.int64],
        layers: range,
    ) -> None:
        kv.require_writable()
        call = arguments(spec, spec.block_nbytes // spec.layers, kv, tokens, memory, offsets, layers=layers)
        copy_blocks(*call, LOAD, _streaming(spec, len(tokens), layers))


def _streaming(spec: KVSpec, blocks: int, layers: range) -> bool:
    return STREAMS and spec.block_nbytes // spec.layers * len(layers) * blocks >= STREAMING_NBYTES
