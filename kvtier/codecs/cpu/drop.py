"""Tokens out of encoded bodies: bytes move, nothing is decoded.

A body with fewer tokens is laid out as one that never had more: what is of one token (its codes, and scales and zero
points of a row) is gathered; what tokens share stays.
"""

from __future__ import annotations

from typing import Any

from numba import types

from kvtier.codecs.cpu.batch import TABLES, ints
from kvtier.codecs.cpu.fields import (
    CODES,
    END,
    GRANULARITY,
    NBYTES,
    OFFSET,
    ROW,
    ROW_NBYTES,
    SCALES,
    TOKENS,
    ZEROS,
    entry_of,
)
from kvtier.codecs.cpu.intrinsics import copy_memory, store_u8
from kvtier.codecs.cpu.jit import compiled, part_of_kernel


@part_of_kernel
def _gather(target: int, source: int, nbytes: int, stays: Any, begin: int, count: int) -> None:
    """Copy the runs of those that stay of `count` rows of `nbytes`."""
    t = 0
    while t < count:
        first = t
        while t < count and stays[begin + t]:
            t += 1
        if t > first:
            copy_memory(target, source + first * nbytes, (t - first) * nbytes)
            target += (t - first) * nbytes
        t += 1


@part_of_kernel
def _drop_part(source: int, target: int, before: Any, after: Any, stays: Any, begin: int) -> None:
    source += before[OFFSET]
    target += after[OFFSET]
    count = before[TOKENS]
    _gather(target + after[CODES], source + before[CODES], before[ROW_NBYTES], stays, begin, count)
    if before[GRANULARITY] == ROW:
        each = ((before[ZEROS] or before[END]) - before[SCALES]) // count
        _gather(target + after[SCALES], source + before[SCALES], each, stays, begin, count)
        if before[ZEROS]:
            _gather(target + after[ZEROS], source + before[ZEROS], each, stays, begin, count)
    else:
        copy_memory(target + after[SCALES], source + before[SCALES], before[END] - before[SCALES])
    for padding in range(target + after[END], target + after[NBYTES]):
        store_u8(padding, 0)


@compiled(types.void(types.UniTuple(types.int64, 2), types.UniTuple(ints(1), 4), types.boolean[::1], TABLES))
def drop_tokens(memory: Any, bodies: Any, stays: Any, tables: Any) -> None:
    """Write bodies anew without some of their tokens.

    `memory`: addresses of the bodies as they are and as they will be. `bodies`: for each where it is, by which table it
    is laid out, where it will be, by which table it will be laid out. `stays`: for each token of each body whether it
    stays. Bodies have no exact tokens, and are of one layer. A body that nothing stays of has no place: its table is
    -1.
    """
    offsets, before, places, after = bodies
    begin = 0
    for i in range(offsets.size):
        for part in range(tables.shape[2]):
            if after[i] >= 0:
                was, is_now = entry_of(tables[before[i]], 0, part), entry_of(tables[after[i]], 0, part)
                _drop_part(memory[0] + offsets[i], memory[1] + places[i], was, is_now, stays, begin)
        begin += tables[before[i], 0, 0, TOKENS]
