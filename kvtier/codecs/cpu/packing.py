"""Rows of float32 to codes and back, whatever the kind of code."""

# ruff: noqa: FBT001, PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

from kvtier.codecs.cpu.fields import E4M3, INT2, INT3, INT4, INT8, LLOYD2, LLOYD3, LLOYD4
from kvtier.codecs.cpu.jit import part_of_kernel
from kvtier.codecs.layout import UNIT, UNIT_NBYTES, Kind
from kvtier.codecs.cpu.units import pack, unpack

QUANTISED = (
    Kind.INT8,
    Kind.INT4,
    Kind.INT3,
    Kind.INT2,
    Kind.E4M3,
    Kind.E5M2,
    Kind.LLOYD4,
    Kind.LLOYD3,
    Kind.LLOYD2,
)


def _loop(step: Any, row_first: bool, nbytes: int, *, each: bool) -> Any:
    """Make f(to, from, a, b, count) of a step over one unit; `each`: a and b are rows, and the last unit may be short."""
    to_step, from_step = (4 * UNIT, nbytes) if row_first else (nbytes, 4 * UNIT)
    parameter = 4 * UNIT if each else 0

    @part_of_kernel
    def over_each(to: int, source: int, one: int, other: int, count: int) -> None:
        for i in range((count + UNIT - 1) // UNIT):
            step(to + i * to_step, source + i * from_step, one + i * parameter, other + i * parameter)

    @part_of_kernel
    def over_alike(to: int, source: int, one: Any, other: Any, count: int) -> None:
        for i in range((count + UNIT - 1) // UNIT):
            step(to + i * to_step, source + i * from_step, one, other)

    return over_each if each else over_alike


def _of_kinds(loops: Any) -> Any:
    """Make f(kind, ...) that calls one of these."""
    int8, int4, int3, int2, e4m3, e5m2, lloyd4, lloyd3, lloyd2 = loops

    @part_of_kernel
    def of_kind(kind: int, to: int, source: int, one: Any, other: Any, count: int) -> None:
        if kind == INT8:
            int8(to, source, one, other, count)
        elif kind == INT4:
            int4(to, source, one, other, count)
        elif kind == E4M3:
            e4m3(to, source, one, other, count)
        elif kind == LLOYD4:
            lloyd4(to, source, one, other, count)
        elif kind == LLOYD2:
            lloyd2(to, source, one, other, count)
        elif kind == INT3:
            int3(to, source, one, other, count)
        elif kind == INT2:
            int2(to, source, one, other, count)
        elif kind == LLOYD3:
            lloyd3(to, source, one, other, count)
        else:
            e5m2(to, source, one, other, count)

    return of_kind


def _unpacked(*, each: bool) -> Any:
    return _of_kinds([_loop(unpack(kind, each=each), True, UNIT_NBYTES[kind], each=each) for kind in QUANTISED])


def _packed(*, each: bool) -> Any:
    symmetric, asymmetric = (
        _of_kinds(
            [_loop(pack(kind, symmetric=s, each=each), False, UNIT_NBYTES[kind], each=each) for kind in QUANTISED]
        )
        for s in (True, False)
    )

    @part_of_kernel
    def packed(kind: int, without_zero: bool, codes: int, row: int, inverse: Any, zero: Any, count: int) -> None:
        if without_zero:
            symmetric(kind, codes, row, inverse, zero, count)
        else:
            asymmetric(kind, codes, row, inverse, zero, count)

    return packed


unpack_each, unpack_alike = _unpacked(each=True), _unpacked(each=False)
pack_each, pack_alike = _packed(each=True), _packed(each=False)
