"""Conversions of several elements at once, as vector code that LLVM fits to any CPU.

numba has no bfloat16 and refuses float16 arrays; here both are 16-bit integers, widened exactly and rounded to nearest
even by integer arithmetic. Narrowed to float16, what is out of range becomes the largest float16.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kvtier.codecs.cpu.intrinsics import HALF, LONG, WORD

MAGIC = 12582912.0
"""1.5 * 2**23: adding it to a small float32 rounds to nearest even and leaves the integer in the low bits."""


def _cpu_features() -> set[str]:
    """What the CPU that numba compiles for can do."""
    features = numba.config.CPU_FEATURES
    if features is None and numba.config.CPU_NAME is None:
        features = binding.get_host_cpu_features().flatten()
    return set((features or "").split(","))


FEATURES = _cpu_features()
HALF_INSTRUCTIONS = platform.machine() in ("aarch64", "arm64") or "+f16c" in FEATURES
"""Whether the CPU rounds to float16 itself; otherwise LLVM would call a library."""
FUSED = platform.machine() in ("aarch64", "arm64") or "+fma" in FEATURES
BFLOAT_INSTRUCTIONS = "+avx512bf16" in FEATURES
"""Whether the CPU rounds to bfloat16 itself."""


def all_of(item: Any, value: Any, lanes: int) -> Any:
    """A constant in every lane."""
    return ir.Constant(ir.VectorType(item, lanes), [value] * lanes)


def as_float(b: Any, bits: Any) -> Any:
    """Words as the float32 that they are the bits of."""
    return b.bitcast(bits, ir.VectorType(ir.FloatType(), bits.type.count))


def as_bits(b: Any, value: Any) -> Any:
    """The bits of float32."""
    return b.bitcast(value, ir.VectorType(WORD, value.type.count))


class _BFloat(ir.types._BaseFloatType):  # type: ignore[misc]  # noqa: SLF001 (llvmlite has no bfloat16)
    """LLVM's bfloat16."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()  # noqa: SLF001 (as llvmlite makes its own types)


def times_plus(b: Any, value: Any, scale: Any, zero: Any) -> Any:
    """Value * scale + zero, where the product is exact: so it does not matter whether it is rounded."""
    if not FUSED:
        return b.fadd(b.fmul(value, scale), zero)
    kind = ir.FunctionType(value.type, [value.type] * 3)
    fma = b.module.declare_intrinsic(f"llvm.fma.v{value.type.count}f32", (), kind)
    return b.call(fma, [value, scale, zero])


def narrow_normal(b: Any, dtype: str, value: Any) -> Any:
    """Narrow float32 that are zeros or no smaller than normal numbers of the dtype: all that codes and scales make."""
    if dtype == "bfloat16" and BFLOAT_INSTRUCTIONS:
        # These instructions take subnormal numbers for zeros.
        narrowed = b.fptrunc(value, ir.VectorType(_BFloat(), value.type.count))
        words = ir.VectorType(WORD, value.type.count // 2)
        # LLVM has no store of bfloat16 past the cache and makes it an ordinary one: so it must not see what this was.
        hidden = ir.FunctionType(words, [words])
        return b.asm(hidden, "", "=v,0", [b.bitcast(narrowed, words)], side_effect=False)
    return STORED[dtype][2](b, value)


def _widen_bf16(b: Any, stored: Any) -> Any:
    n = stored.type.count
    return as_float(b, b.shl(b.zext(stored, ir.VectorType(WORD, n)), all_of(WORD, 16, n)))


def _narrow_bf16(b: Any, value: Any) -> Any:
    bits, n = as_bits(b, value), value.type.count
    odd = b.and_(b.lshr(bits, all_of(WORD, 16, n)), all_of(WORD, 1, n))
    rounded = b.add(bits, b.add(odd, all_of(WORD, 0x7FFF, n)))
    halves = b.bitcast(rounded, ir.VectorType(HALF, 2 * n))
    upper = ir.Constant(ir.VectorType(WORD, n), list(range(1, 2 * n, 2)))
    return b.shuffle_vector(halves, ir.Constant(halves.type, ir.Undefined), upper)


def _widen_fp16(b: Any, stored: Any) -> Any:
    n = stored.type.count
    if HALF_INSTRUCTIONS:
        return b.fpext(b.bitcast(stored, ir.VectorType(ir.HalfType(), n)), ir.VectorType(ir.FloatType(), n))
    word = b.zext(stored, ir.VectorType(WORD, n))
    sign = b.shl(b.and_(word, all_of(WORD, 0x8000, n)), all_of(WORD, 16, n))
    magnitude = b.shl(b.and_(word, all_of(WORD, 0x7FFF, n)), all_of(WORD, 13, n))
    normal = b.add(magnitude, all_of(WORD, 112 << 23, n))
    special = b.icmp_unsigned(">=", magnitude, all_of(WORD, 0x7C00 << 13, n))
    normal = b.select(special, b.add(normal, all_of(WORD, 112 << 23, n)), normal)
    small = b.fsub(as_float(b, b.add(magnitude, all_of(WORD, 113 << 23, n))), all_of(ir.FloatType(), 2.0**-14, n))
    is_small = b.icmp_unsigned("<", magnitude, all_of(WORD, 0x0400 << 13, n))
    return as_float(b, b.or_(b.select(is_small, as_bits(b, small), normal), sign))


def _narrow_fp16(b: Any, value: Any) -> Any:
    n = value.type.count
    for order, edge in ((">", 65504.0), ("<", -65504.0)):
        limit = all_of(ir.FloatType(), edge, n)
        value = b.select(b.fcmp_ordered(order, value, limit), limit, value)
    if HALF_INSTRUCTIONS:
        return b.bitcast(b.fptrunc(value, ir.VectorType(ir.HalfType(), n)), ir.VectorType(HALF, n))
    bits = as_bits(b, value)
    sign = b.and_(b.lshr(bits, all_of(WORD, 16, n)), all_of(WORD, 0x8000, n))
    magnitude = b.and_(bits, all_of(WORD, 0x7FFFFFFF, n))
    odd = b.and_(b.lshr(magnitude, all_of(WORD, 13, n)), all_of(WORD, 1, n))
    rounded = b.add(b.sub(magnitude, all_of(WORD, 112 << 23, n)), b.add(odd, all_of(WORD, 0xFFF, n)))
    half = b.lshr(rounded, all_of(WORD, 13, n))
    shifted = as_bits(b, b.fadd(as_float(b, magnitude), all_of(ir.FloatType(), 0.5, n)))
    small = b.sub(shifted, all_of(WORD, 126 << 23, n))
    half = b.select(b.icmp_unsigned("<", magnitude, all_of(WORD, 113 << 23, n)), small, half)
    return b.trunc(b.or_(half, sign), ir.VectorType(HALF, n))


STORED: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any]]] = {
    "bfloat16": (HALF, _widen_bf16, _narrow_bf16),
    "float16": (HALF, _widen_fp16, _narrow_fp16),
    "float32": (WORD, as_float, as_bits),
}
"""Of each dtype: the integer that holds it, to float32 and from float32."""


def splat(b: Any, value: Any, lanes: int) -> Any:
    """One value in every lane."""
    vector = ir.VectorType(value.type, lanes)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), value, WORD(0))
    return b.shuffle_vector(first, ir.Constant(vector, ir.Undefined), all_of(WORD, 0, lanes))


def look_up(b: Any, table: NDArray[np.float32], places: Any) -> Any:
    """Of a table of up to 16 float32, the ones at these places (words)."""
    single = ir.FloatType()
    if "+avx512f" in FEATURES:
        row = ir.VectorType(single, 16)
        whole = ir.Constant(row, [float(table[i % len(table)]) for i in range(16)])
        kind = ir.FunctionType(row, [row, ir.VectorType(WORD, 16)])
        permute = b.module.declare_intrinsic("llvm.x86.avx512.permvar.sf.512", (), kind)
        return join(b, [b.call(permute, [whole, part(b, places, i, 16)]) for i in range(0, places.type.count, 16)])
    count = places.type.count
    found = all_of(single, float(table[0]), count)
    for i, value in enumerate(table[1:], 1):
        here = b.icmp_unsigned("==", places, all_of(WORD, i, count))
        found = b.select(here, all_of(single, float(value), count), found)
    return found


def part(b: Any, value: Any, first: int, count: int) -> Any:
    """Lanes `first` to `first + count` of a vector."""
    return b.shuffle_vector(value, value, ir.Constant(ir.VectorType(WORD, count), list(range(first, first + count))))


def join(b: Any, parts: list[Any]) -> Any:
    """One vector of several; their number is a power of two."""
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(WORD, count), list(range(count)))
        parts = [b.shuffle_vector(parts[i], parts[i + 1], order) for i in range(0, len(parts), 2)]
    return parts[0]


def one_widened(dtype: str) -> Any:
    """Make f(bits): the float32 of one element."""
    item, widened, _ = STORED[dtype]

    @intrinsic
    def convert(typingctx: Any, bits: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            one = b.bitcast(b.trunc(args[0], item), ir.VectorType(item, 1))
            return b.extract_element(widened(b, one), WORD(0))

        return types.float32(types.int64), emit

    return convert


def one_narrowed(dtype: str) -> Any:
    """Make f(value): the bits of one float32 as an element."""
    _, _, narrowed = STORED[dtype]

    @intrinsic
    def convert(typingctx: Any, value: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            one = b.insert_element(ir.Constant(ir.VectorType(ir.FloatType(), 1), ir.Undefined), args[0], WORD(0))
            return b.zext(b.extract_element(narrowed(b, one), WORD(0)), LONG)

        return types.int64(types.float32), emit

    return convert
