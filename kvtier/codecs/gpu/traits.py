"""What kernels are compiled for: how a part is stored, and how the caller's KV lies."""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from kvtier.codecs.layout import Field, Granularity, Kind
from kvtier.codecs.scheme import LARGEST
from kvtier.spec import KVSpec

_BITS = {Kind.RAW: 0, Kind.FP16: 16, Kind.BF16: 16, Kind.INT4: 4, Kind.INT3: 3, Kind.INT2: 2}
_BITS |= {Kind.LLOYD4: 4, Kind.LLOYD3: 3, Kind.LLOYD2: 2}


@dataclass(frozen=True, slots=True)
class Stored:
    """A part as it is stored.

    Attributes:
        form: "raw", "fp16", "bf16", "int", "e4m3", "e5m2" or "lloyd".
        bits: of one code.
        symmetric: no zero point.
        clip: the range is narrowed so that the squared error is least.
        granularity: "none", "tensor", "row" or "channel": see `layout.Granularity`.
        group: elements (row) or tokens (channel, tensor) that share a scale.
        groups: scales of one head of one token (row).
        rotation: 2**rotation elements are rotated together.
        tokens: of a block.
        heads: of a token.
        dim: elements of a head.
        elements: of a token.
        row_nbytes: bytes of the codes of one token.
        zero: the integer code of 0.
        most: the largest code, or float of 8 bits: what the scale is a share of.
        aligned: what everything in a body is at multiples of, at most 16.
    """

    form: str
    bits: int
    symmetric: bool
    clip: bool
    granularity: str
    group: int
    groups: int
    rotation: int
    tokens: int
    heads: int
    dim: int
    elements: int
    row_nbytes: int
    zero: int
    most: float
    aligned: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The caller's KV.

    Attributes:
        element: dtype.
        word: an integer of as many bits.
        nbytes: what all addresses and strides are multiples of, at most 16.
        dense: whether a head's elements follow each other.
        page_tokens: tokens in a page; 0: not paged.
        native: whether the device rounds float32 to bfloat16 to nearest even. Triton's interpreter truncates.
    """

    element: tl.dtype
    word: tl.dtype
    nbytes: int
    dense: bool
    page_tokens: int
    native: bool


def traits(entry: dict[Field, int], spec: KVSpec, dim: int) -> Stored:
    """Of one part of a layout; `aligned` is not known yet."""
    kind = Kind(entry[Field.KIND])
    bits = _BITS.get(kind, 8)
    form = "lloyd" if kind.name.startswith("LLOYD") else "int" if kind.name.startswith("INT") else kind.name.lower()
    symmetric = not entry[Field.ZEROS]
    granularity, group = Granularity(entry[Field.GRANULARITY]), entry[Field.GROUP]
    if form == "int":
        most: float = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    else:
        most = LARGEST.get(form, 0.0)
    return Stored(
        form=form,
        bits=bits,
        symmetric=symmetric,
        clip=bool(entry[Field.CLIP]),
        granularity=granularity.name.lower(),
        group=group or spec.block_tokens,
        groups=-(-dim // group) if granularity is Granularity.ROW else 1,
        rotation=max(entry[Field.ROTATION], 1).bit_length() - 1,
        tokens=spec.block_tokens,
        heads=spec.kv_heads,
        dim=dim,
        elements=spec.kv_heads * dim,
        row_nbytes=entry[Field.ROW_NBYTES],
        zero=2 ** (bits - 1) if symmetric and form in ("int", "lloyd") else 0,
        most=float(most),
        aligned=1,
    )
