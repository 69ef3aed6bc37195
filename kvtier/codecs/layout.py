"""Where everything of a body lies: the same for every kernel, on any device, and for the reference.

A body holds its layers one after the other, a layer its parts (K, V; MLA: the latent). A part is

    exact tokens   [sinks, kv_heads, dim]              as the KV has them; in the first block of a sequence only
    codes          [tokens, row_nbytes]                a row is one token, all heads
    scales         float16, see `Granularity`
    zeros          float16, as many; schemes with a zero point only

and is filled with zeros to a multiple of 64 bytes; a part that is "raw" is its elements, and not filled up. `tokens`
are those that are not exact. Within a row, 32 elements make a unit; the last unit of a row is filled with the code of
0 (levels: of the least above it), where there is a zero point with code 0. Of 32 elements e,

    8 bits    byte i is element i
    4 bits    byte i is e[i] | e[i + 16] << 4                              i < 16
    2 bits    byte i is e[i] | e[i + 8] << 2 | e[i + 16] << 4 | e[i + 24] << 6    i < 8
    3 bits    the lower two bits of each as 2 bits, then a word of 32 bits: bit i is the upper bit of e[i]
    16 bits   element i

little-endian throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvtier.codecs.plan import LayerPlan
from kvtier.codecs.scheme import Scheme
from kvtier.spec import KVSpec

UNIT = 32
"""Elements that are packed together."""
ALIGN = 64


class Kind(IntEnum):
    """What a code is, as kernels number it."""

    RAW = 0
    FP16 = 1
    BF16 = 2
    INT8 = 3
    INT4 = 4
    INT3 = 5
    INT2 = 6
    E4M3 = 7
    E5M2 = 8
    LLOYD4 = 9
    LLOYD3 = 10
    LLOYD2 = 11


class Granularity(IntEnum):
    """What shares a scale, as kernels number it."""

    NONE = 0
    TENSOR = 1
    """One scale."""
    ROW = 2
    """Scales `[tokens, kv_heads, ceil(dim / group)]`."""
    CHANNEL = 3
    """Scales `[ceil(tokens / group), kv_heads * dim]`."""


class Field(IntEnum):
    """Columns of `Layout.table`: everything that a kernel is told of a part."""

    OFFSET = 0
    """Of the part, from the beginning of the body."""
    NBYTES = 1
    KIND = 2
    SINKS = 3
    """Exact tokens in this block."""
    CODES = 4
    """Of the codes, from the beginning of the part."""
    ROW_NBYTES = 5
    GRANULARITY = 6
    GROUP = 7
    """Elements (ROW) or tokens (CHANNEL) that share a scale."""
    SCALES = 8
    ZEROS = 9
    """Of the zeros, from the beginning of the part; 0 when there are none."""
    ROTATION = 10
    """Elements that are rotated together, a power of two; 0 or 1: none are."""
    CLIP = 11
    END = 12
    """Of what is written, from the beginning of the part; zeros follow."""
    TOKENS = 13
    """Of the body, exact ones included."""


FIELDS = len(Field)
UNIT_NBYTES = dict.fromkeys(Kind, UNIT) | {
    Kind.INT4: 16,
    Kind.LLOYD4: 16,
    Kind.INT3: 12,
    Kind.LLOYD3: 12,
    Kind.INT2: 8,
    Kind.LLOYD2: 8,
}
"""Bytes of a unit of quantised codes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Of the block at one position.

    Attributes:
        table: int64 `[layers, parts, FIELDS]`.
        layers: int64 `[layers + 1]`, where each layer begins, and the body's size.
    """

    table: NDArray[np.int64]
    layers: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes of the body."""
        return int(self.layers[-1])


def layout(plan: tuple[LayerPlan, ...], spec: KVSpec, *, first: bool) -> Layout:
    """Lay out the first block of a sequence, or any other."""
    table = np.zeros((spec.layers, len(spec.head_dims), FIELDS), np.int64)
    layers, at = [0], 0
    for number, layer in enumerate(plan):
        sinks = layer.sinks if first else 0
        for part, (scheme, dim) in enumerate(zip(layer.schemes, spec.head_dims, strict=True)):
            row = _part(scheme, spec, dim, sinks)
            row[Field.OFFSET] = at
            at += row[Field.NBYTES]
            table[number, part] = [row.get(field, 0) for field in Field]
        layers.append(at)
    table.flags.writeable = False
    return Layout(table, np.array(layers, np.int64))


def row_nbytes(bits: int, elements: int) -> int:
    """Bytes of a row of codes."""
    return -(-elements // UNIT) * UNIT * bits // 8


def _part(scheme: Scheme, spec: KVSpec, dim: int, sinks: int) -> dict[Field, int]:
    elements = spec.kv_heads * dim
    if scheme.precision == "raw":
        nbytes = spec.block_tokens * elements * spec.itemsize
        return {Field.KIND: Kind.RAW, Field.NBYTES: nbytes, Field.END: nbytes, Field.TOKENS: spec.block_tokens}
    tokens = spec.block_tokens - sinks
    codes = _up(sinks * elements * spec.itemsize, 2)
    row = row_nbytes(scheme.bits, elements)
    granularity, group, count = _scales(scheme, tokens, spec.kv_heads, dim)
    scales = codes + tokens * row
    zeros = 0 if scheme.symmetric else scales + 2 * count
    end = scales + 2 * count * (1 if scheme.symmetric else 2)
    return {
        Field.NBYTES: _up(end, ALIGN),
        Field.KIND: _kind(scheme),
        Field.SINKS: sinks,
        Field.CODES: codes,
        Field.ROW_NBYTES: row,
        Field.GRANULARITY: granularity,
        Field.GROUP: group,
        Field.SCALES: scales,
        Field.ZEROS: zeros,
        Field.ROTATION: dim & -dim if scheme.hadamard else 0,
        Field.CLIP: scheme.clip,
        Field.END: end,
        Field.TOKENS: spec.block_tokens,
    }


def _kind(scheme: Scheme) -> Kind:
    return Kind[f"LLOYD{scheme.bits}" if scheme.lloyd else scheme.precision.upper()]


def _scales(scheme: Scheme, tokens: int, heads: int, dim: int) -> tuple[Granularity, int, int]:
    """Granularity, how many share a scale, and how many scales there are."""
    match scheme.granularity:
        case "tensor":
            return Granularity.TENSOR, 0, 1
        case "channel":
            return Granularity.CHANNEL, scheme.group, -(-tokens // scheme.group) * heads * dim
        case "token" | "group":
            group = min(scheme.group or dim, dim)
            return Granularity.ROW, group, tokens * heads * -(-dim // group)
    return Granularity.NONE, 0, 0


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
