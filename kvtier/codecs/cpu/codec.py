"""The codec of every plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier.codecs.cpu.batch import STREAMING_NBYTES, Shape, Tables, arguments
from kvtier.codecs.cpu.decode import decode_blocks
from kvtier.codecs.cpu.encode import encode_blocks
from kvtier.codecs.cpu.intrinsics import STREAMS
from kvtier.codecs.layout import layout
from kvtier.codecs.plan import canonical, parse_plan, resolve
from kvtier.codecs.view import KVView
from kvtier.errors import UsageError
from kvtier.spec import KVSpec


class PlanCodec:
    """Carries out a plan for blocks of one spec, on the CPU; `layout` says what a body looks like.

    How far off an element x may be, with the scale s and the zero point z of its group, which spans from a to b, and
    the roundoff u of the KV's dtype (2**-8 for bfloat16, 2**-11 for float16, nothing for float32) and of the
    arithmetic (2**-24 more):

        raw                      exact
        fp16, bf16               rounded to that once, then to the dtype
        int, symmetric           |x - x'| <= (1/2 + 2**-14) s + u |x'|        s <= max(|a|, |b|) / most * r + 2**-24
        int, asymmetric          |x - x'| <= (1/2 + 2**-14) s + u |x'|        s <= (b - z) / most * r + 2**-24
                                                                              z: a rounded down to a float16
        e4m3, e5m2               |x - x'| <= max(h |x - z|, t s) + u |x'|     s <= max(b - z, z - a) / most * r + 2**-24
                                                                              z: (a + b) / 2 as float16; symmetric: 0

    where `most` is the number of steps (127, 7, 3, 1 symmetric; 255, 15, 7, 3 asymmetric; 448 and 57344), r = 1 +
    2**-9 is the rounding of s up to a float16, h = 2**-4 and t = 2**-10 for e4m3, h = 2**-3 and t = 2**-17 for e5m2,
    each times 1 + 2**-9; where the KV is float16, 2**-25 more, as it has no smaller step. Zeros come back as zeros, a
    group of one float16 that has a zero point as it was, and so does what is z + code * s, if the group has the first
    and the last code.

    With `hadamard` the bound holds of the rotated row, and so, its matrix being orthogonal, of the row's Euclidean
    length: |x - x'|_2 is at most the root of the summed squares, and 2**-19 |x|_2 for rotating there and back. With
    `lloyd` it is the root of 2 times that of the nearest levels at the row's root mean square, and 2**-11 |x|_2 for the
    scale's rounding: the scale that is stored gives the row its own length. With `clip` the summed squares of a group
    are at most what they would be without, up to rounding.

    Cannot be stored under a quantised scheme, whose block is refused and counted: NaN, Inf, a scale or zero point that
    no float16 holds; under `fp16`, what is beyond its range. "raw", and the exact first tokens of a plan, hold any
    bits.
    """

    number = 3

    def __init__(self, plan: str, spec: KVSpec) -> None:
        layers = resolve(parse_plan(plan), spec)
        self.plan, self.spec = canonical(layers), spec
        self.layouts = layout(layers, spec, first=True), layout(layers, spec, first=False)
        self._shape, self._tables = Shape(spec), Tables(self.layouts)

    def layers(self, position: int) -> NDArray[np.int64]:
        return self.layouts[position > 0].layers

    def nbytes(self, position: int) -> int:
        return self.layouts[position > 0].nbytes

    def encode(
        self,
        kv: KVView,
        tokens: NDArray[np.int64],
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        positions: NDArray[np.int64],
        layers: range,
    ) -> NDArray[np.bool_]:
        if not memory.flags.writeable:
            raise UsageError("memory is read-only; blocks are encoded into a writable map")
        call = arguments(self._shape, self._tables, kv, (tokens, offsets, _others(positions)), memory, layers)
        stored = np.empty(len(tokens), np.bool_)
        encode_blocks(*call, self._streaming(len(tokens), layers), stored)
        return stored

    def decode(
        self,
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        positions: NDArray[np.int64],
        kv: KVView,
        tokens: NDArray[np.int64],
        layers: range,
    ) -> None:
        kv.require_writable()
        call = arguments(self._shape, self._tables, kv, (tokens, offsets, _others(positions)), memory, layers)
        decode_blocks(*call, self._streaming(len(tokens), layers))

    def _streaming(self, blocks: int, layers: range) -> bool:
        """Whether so much is moved that it would push everything else out of the cache."""
        return STREAMS and self.spec.block_nbytes // self.spec.layers * len(layers) * blocks >= STREAMING_NBYTES


def _others(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which layout the blocks have: 0 where a sequence begins, 1 elsewhere."""
    return (np.asarray(positions) != 0).astype(np.int64)
