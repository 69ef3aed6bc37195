"""Rows of float32 to codes and back, whatever the kind of code."""

from __future__ import annotations

from typing import Any

from kvtier.codecs.cpu.fields import E4M3, INT2, INT3, INT4, INT8, LLOYD2, LLOYD3, LLOYD4
from kvtier.codecs.cpu.jit import part_of_kernel
from kvtier.codecs.cpu.units import pack, unpack
from kvtier.codecs.layout import UNIT, UNIT_NBYTES, Kind


@part_of_kernel
def unit_nbytes(kind: int) -> int:
    """Bytes of 32 codes."""
    if kind in (INT4, LLOYD4):
        return 16
    if kind in (INT3, LLOYD3):
        return 12
    return 8 if kind in (INT2, LLOYD2) else 32


def _unpacker(kind: Kind, *, each: bool) -> Any:
    step, nbytes, parameter = unpack(kind, each=each), UNIT_NBYTES[kind], 4 * UNIT if each else 0

    @part_of_kernel
    def over_each(row: int, codes: int, scale: int, zero: int, count: int) -> None:
        for i in range((count + UNIT - 1) // UNIT):
            step(row + i * 4 * UNIT, codes + i * nbytes, scale + i * parameter, zero + i * parameter)

    @part_of_kernel
    def over_alike(row: int, codes: int, scale: Any, zero: Any, count: int) -> None:
        for i in range((count + UNIT - 1) // UNIT):
            step(row + i * 4 * UNIT, codes + i * nbytes, scale, zero)

    return over_each if each else over_alike


def _packer(kind: Kind, *, each: bool) -> Any:
    step, nbytes, parameter = pack(kind, each=each), UNIT_NBYTES[kind], 4 * UNIT if each else 0

    @part_of_kernel
    def over_each(codes: int, row: int, inverse: int, zero: int, count: int, within: Any) -> None:
        for i in range((count + UNIT - 1) // UNIT):
            step(codes + i * nbytes, row + i * 4 * UNIT, inverse + i * parameter, zero + i * parameter, within)

    @part_of_kernel
    def over_alike(codes: int, row: int, inverse: Any, zero: Any, count: int, within: Any) -> None:
        for i in range((count + UNIT - 1) // UNIT):
            step(codes + i * nbytes, row + i * 4 * UNIT, inverse, zero, within)

    return over_each if each else over_alike


def _of_kinds(make: Any, *, each: bool) -> Any:
    """Make f(kind, ...): that of one kind."""
    int8, int4, int3, int2 = (make(kind, each=each) for kind in (Kind.INT8, Kind.INT4, Kind.INT3, Kind.INT2))
    lloyd4, lloyd3, lloyd2 = (make(kind, each=each) for kind in (Kind.LLOYD4, Kind.LLOYD3, Kind.LLOYD2))
    e4m3, e5m2 = make(Kind.E4M3, each=each), make(Kind.E5M2, each=each)

    @part_of_kernel
    def of_kind(kind: int, *args: Any) -> None:
        if kind == INT8:
            int8(*args)
        elif kind == INT4:
            int4(*args)
        elif kind == E4M3:
            e4m3(*args)
        elif kind == LLOYD4:
            lloyd4(*args)
        elif kind == LLOYD2:
            lloyd2(*args)
        elif kind == INT3:
            int3(*args)
        elif kind == INT2:
            int2(*args)
        elif kind == LLOYD3:
            lloyd3(*args)
        else:
            e5m2(*args)

    return of_kind


unpack_each, unpack_alike = _of_kinds(_unpacker, each=True), _of_kinds(_unpacker, each=False)
"""f(kind, row, codes, scale, zero, count): the former with a row of scales and one of zero points."""
pack_each, pack_alike = _of_kinds(_packer, each=True), _of_kinds(_packer, each=False)
"""f(kind, codes, row, inverse, zero, count, within): see `units.pack`."""
