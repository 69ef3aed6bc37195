"""Decoding of the commonest codes into 16-bit memory past the cache, without a row of float32 between.

The bits are the same; a store and a load less for each element are what is left to save where the memory does not wait.
"""

from __future__ import annotations

from typing import Any

from kvtier.codecs.cpu.fields import E4M3, GRANULARITY, GROUP, INT4, INT8, KIND, ROTATION, ROW
from kvtier.codecs.cpu.intrinsics import LINE, load_f32
from kvtier.codecs.cpu.jit import part_of_kernel
from kvtier.codecs.cpu.rows import BFLOAT16, FLOAT32
from kvtier.codecs.cpu.units import stream
from kvtier.codecs.layout import UNIT, UNIT_NBYTES, Kind


def _streamer(kind: Kind, dtype: str, *, each: bool) -> Any:
    step, nbytes = stream(kind, dtype, each=each), UNIT_NBYTES[kind]

    @part_of_kernel
    def over_each(at: int, by: Any, codes: int, scales: int, zeros: int, extent: Any) -> None:
        tokens, heads, dim = extent
        for _ in range(tokens):
            scale, zero = scales, zeros
            for head in range(heads):
                for i in range(dim // UNIT):
                    step(at + head * by[1] + i * 2 * UNIT, codes, scale, zero)
                    codes += nbytes
                    scale += 4 * UNIT
                    zero += 4 * UNIT
            at += by[0]

    @part_of_kernel
    def over_alike(at: int, by: Any, codes: int, scales: int, zeros: int, extent: Any) -> None:
        tokens, heads, dim = extent
        units = by[2] // UNIT
        for _ in range(tokens):
            for head in range(heads):
                row = at + head * by[1]
                for _group in range(dim // by[2]):
                    scale, zero = load_f32(scales), load_f32(zeros)
                    for i in range(units):
                        step(row + i * 2 * UNIT, codes + i * nbytes, scale, zero)
                    row += 2 * by[2]
                    codes += units * nbytes
                    scales += 4
                    zeros += 4
            at += by[0]

    return over_each if each else over_alike


def _of_kinds(*, each: bool) -> Any:
    int8, int8_fp16 = (_streamer(Kind.INT8, dtype, each=each) for dtype in ("bfloat16", "float16"))
    int4, int4_fp16 = (_streamer(Kind.INT4, dtype, each=each) for dtype in ("bfloat16", "float16"))
    e4m3, e4m3_fp16 = (_streamer(Kind.E4M3, dtype, each=each) for dtype in ("bfloat16", "float16"))

    @part_of_kernel
    def of_kind(kind: int, dtype: int, *args: Any) -> None:
        if dtype == BFLOAT16:
            if kind == INT8:
                int8(*args)
            elif kind == INT4:
                int4(*args)
            else:
                e4m3(*args)
        elif kind == INT8:
            int8_fp16(*args)
        elif kind == INT4:
            int4_fp16(*args)
        else:
            e4m3_fp16(*args)

    return of_kind


stream_each, stream_alike = _of_kinds(each=True), _of_kinds(each=False)
"""f(kind, dtype, at, by, codes, scales, zeros, (tokens, heads, dim)): whole tokens.

`by`: bytes from one token and one head to the next, and how many elements share a scale. The former has a scale and a
zero point for each element of a token, the same for all tokens; the latter for each group, one after the other.
"""


@part_of_kernel
def is_direct(entry: Any, base: int, step: Any, dim: int, dtype: int, streaming: Any) -> bool:
    """Whether every head is whole units that lie in whole cache lines, and its codes are of a common kind."""
    if not streaming or dtype == FLOAT32 or entry[ROTATION] > 1 or entry[KIND] not in (INT8, INT4, E4M3):
        return False
    if dim % UNIT or (entry[GRANULARITY] == ROW and (entry[GROUP] % UNIT or dim % entry[GROUP])):
        return False
    return step[2] == 2 and (base | step[0] | step[1] | step[3]) % LINE == 0
