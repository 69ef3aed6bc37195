"""The layout's enumerations as plain integers: kernels are compiled with their values."""

from __future__ import annotations

from typing import Any

from kvtier.codecs.cpu.jit import part_of_kernel
from kvtier.codecs.layout import Field, Granularity, Kind

OFFSET, NBYTES, KIND, SINKS = int(Field.OFFSET), int(Field.NBYTES), int(Field.KIND), int(Field.SINKS)
CODES, ROW_NBYTES, SCALES, ZEROS = int(Field.CODES), int(Field.ROW_NBYTES), int(Field.SCALES), int(Field.ZEROS)
GRANULARITY, GROUP, ROTATION = int(Field.GRANULARITY), int(Field.GROUP), int(Field.ROTATION)
CLIP, END, TOKENS = int(Field.CLIP), int(Field.END), int(Field.TOKENS)

UNSCALED, TENSOR = int(Granularity.NONE), int(Granularity.TENSOR)
ROW, CHANNEL = int(Granularity.ROW), int(Granularity.CHANNEL)

RAW, FP16, BF16 = int(Kind.RAW), int(Kind.FP16), int(Kind.BF16)
INT8, INT4, INT3, INT2 = int(Kind.INT8), int(Kind.INT4), int(Kind.INT3), int(Kind.INT2)
E4M3, E5M2 = int(Kind.E4M3), int(Kind.E5M2)
LLOYD4, LLOYD3, LLOYD2 = int(Kind.LLOYD4), int(Kind.LLOYD3), int(Kind.LLOYD2)


@part_of_kernel
def entry_of(table: Any, layer: int, part: int) -> Any:
    """One part's fields of a layout, as a tuple."""
    at = table[layer, part]
    return (at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9], at[10], at[11], at[12], at[13])
