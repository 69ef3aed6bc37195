"""One byte an element, one scale a token and KV head."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier.codecs.batch import STREAMING_NBYTES, arguments
from kvtier.codecs.int8_kernel import DTYPES, decode_blocks, encode_blocks
from kvtier.codecs.intrinsics import STREAMS
from kvtier.codecs.view import KVView
from kvtier.errors import UsageError
from kvtier.spec import KVSpec

LAYER_ALIGN = 64


class Int8Codec:
    """Symmetric int8 for K and V alike; a row is one token of one KV head.

    A layer is, for K and then for V (MLA: for the latent), codes int8 `[block_tokens, kv_heads, dim]` and scales
    float16 `[block_tokens, kv_heads]`; zeros fill it up to a multiple of 64 bytes.

    Of a row with the largest magnitude `a`, the scale `s` is `a / 127` rounded up to a float16, at least `2**-24` (0
    only for a row of zeros, which comes back as zeros), and for float16 KV at most 515.5, so that no code overflows.
    Each code is `x / s` rounded to nearest even. Decoding multiplies, exactly, and rounds once to the dtype. So

        |x - decode(encode(x))| <= (1/2 + 2**-15) s + 127 u s      s <= a / 127 * (1 + 2**-10) + 2**-24

    with the dtype's unit roundoff u: 2**-8 for bfloat16, 2**-11 for float16, 0 for float32.

    Cannot be stored: NaN, Inf, and magnitudes above 127 * 65504 = 8,319,008, whose scale no float16 holds.
    """

    number = 2
    plan = "int8/token/sym"

    def layer_nbytes(self, spec: KVSpec, position: int) -> int:
        rows = spec.block_tokens * spec.kv_heads
        return -(-rows * sum(dim + 2 for dim in spec.head_dims) // LAYER_ALIGN) * LAYER_ALIGN

    def nbytes(self, spec: KVSpec, position: int) -> int:
        return self.layer_nbytes(spec, position) * spec.layers

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
        call = arguments(spec, self.layer_nbytes(spec, 0), kv, tokens, memory, offsets, layers=layers)
        stored = np.empty(len(tokens), np.bool_)
        encode_blocks(*call, DTYPES[spec.dtype], stored)
        return stored

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
        call = arguments(spec, self.layer_nbytes(spec, 0), kv, tokens, memory, offsets, layers=layers)
        written = spec.block_nbytes // spec.layers * len(layers) * len(tokens)
        decode_blocks(*call, DTYPES[spec.dtype], STREAMS and written >= STREAMING_NBYTES)
