"""Reading and writing memory by address, inside a kernel.

Addresses are int64. Nothing here checks a bound: that is done once a call, in `batch`.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

STREAMS = platform.machine() in ("x86_64", "AMD64")
"""Whether this machine has stores that bypass the cache and the fence that they need."""

BYTE = ir.IntType(8)
HALF = ir.IntType(16)
WORD = ir.IntType(32)
LONG = ir.IntType(64)
LINE = 64
"""Bytes of a cache line."""


def load_vector(builder: Any, address: Any, item: Any, lanes: int) -> Any:
    """Emit the load of `lanes` items from any address."""
    kind = ir.VectorType(item, lanes)
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store_vector(builder: Any, value: Any, address: Any, *, streaming: bool = False) -> None:
    """Emit the store of a vector to any address; streaming: past the cache, whole lines to whole lines.

    Never less than a line: LLVM turns a narrowing and a short store into one that does not stream, and a line that is
    written both ways costs more than it saves.
    """
    if not streaming:
        builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)
        return
    count = LINE * 8 // value.type.element.width
    for first in range(0, value.type.count, count):
        lanes = ir.Constant(ir.VectorType(WORD, count), list(range(first, first + count)))
        piece = builder.shuffle_vector(value, value, lanes)
        where = builder.add(address, LONG(first * value.type.element.width // 8))
        store = builder.store(piece, builder.inttoptr(where, piece.type.as_pointer()), align=LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([WORD(1)]))


@intrinsic
def copy_memory(typingctx: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """memcpy(target, source, nbytes)."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, nbytes = args
        pointer = BYTE.as_pointer()
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, LONG])
        where = [builder.inttoptr(address, pointer) for address in (target, source)]
        builder.call(memcpy, [*where, nbytes, ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def stream_line(typingctx: Any, target: Any, source: Any) -> Any:
    """Copy 64 bytes past the cache; `target` is a multiple of 64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store_vector(builder, load_vector(builder, args[1], BYTE, LINE), args[0], streaming=True)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at any address, which may be invalid."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD])
        call = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        builder.call(call, [builder.inttoptr(args[0], pointer), WORD(0), WORD(3), WORD(1)])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def fence(typingctx: Any) -> Any:
    """Order streaming stores before everything that follows."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if STREAMS:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse.sfence", (), kind), [])
        return context.get_dummy_value()

    return types.void(), emit


def _scalar(item: Any, result: Any, *, loads: bool) -> Any:
    if loads:

        @intrinsic
        def load(typingctx: Any, address: Any) -> Any:
            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                value = builder.load(builder.inttoptr(args[0], item.as_pointer()), align=1)
                return value if item == LONG else builder.zext(value, LONG)

            return result(types.int64), emit

        return load

    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.trunc(args[1], item)
            builder.store(value, builder.inttoptr(args[0], item.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, result), emit

    return store


load_u16 = _scalar(HALF, types.int64, loads=True)
load_u32 = _scalar(WORD, types.int64, loads=True)
load_i64 = _scalar(LONG, types.int64, loads=True)
store_u8 = _scalar(BYTE, types.int64, loads=False)
store_u16 = _scalar(HALF, types.int64, loads=False)
store_u32 = _scalar(WORD, types.int64, loads=False)


@intrinsic
def load_f32(typingctx: Any, address: Any) -> Any:
    """The float32 at any address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=1)

    return types.float32(types.int64), emit


@intrinsic
def store_f32(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a float32 to any address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit
