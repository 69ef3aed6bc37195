"""Elements as they are: bytes moved between a caller's memory and bodies in the longest runs that there are."""

# ruff: noqa: FBT001, PLR0917 (numba passes a kernel's arguments by position)

from __future__ import annotations

from typing import Any

from kvtier.codecs.cpu.intrinsics import (
    LINE,
    copy_memory,
    load_i64,
    load_u16,
    load_u32,
    store_u16,
    store_u32,
    stream_line,
)
from kvtier.codecs.cpu.jit import part_of_kernel

LOAD, STORE = True, False
"""Directions: out of bodies, into bodies."""


@part_of_kernel
def copy_run(target: int, source: int, nbytes: int, streaming: bool) -> None:
    """Copy contiguous bytes; streaming: whole cache lines past the cache."""
    if not streaming or nbytes < 2 * LINE:
        copy_memory(target, source, nbytes)
        return
    head = -target % LINE
    if head:
        copy_memory(target, source, head)
    stop = nbytes - (nbytes - head) % LINE
    for at in range(head, stop, LINE):
        stream_line(target + at, source + at)
    if stop < nbytes:
        copy_memory(target + stop, source + stop, nbytes - stop)


@part_of_kernel
def _copy_element(target: int, source: int, itemsize: int) -> None:
    if itemsize == 2:
        store_u16(target, load_u16(source))
    else:
        store_u32(target, load_u32(source))


@part_of_kernel
def _copy_strided(body: int, at: int, step: Any, extent: Any, load: bool) -> None:
    for t in range(extent[0]):
        for h in range(extent[1]):
            for d in range(extent[2]):
                kv = at + t * step[0] + h * step[1] + d * step[2]
                stored = body + ((t * extent[1] + h) * extent[2] + d) * extent[3]
                if load:
                    _copy_element(kv, stored, extent[3])
                else:
                    _copy_element(stored, kv, extent[3])


@part_of_kernel
def _copy_run_of_tokens(body: int, at: int, step: Any, extent: Any, load: bool, streaming: bool) -> None:
    tokens, heads, dim, itemsize = extent
    row = dim * itemsize
    if dim > 1 and step[2] != itemsize:
        _copy_strided(body, at, step, extent, load)
        return
    outer, inner = tokens, heads
    if heads == 1 or step[1] == row:
        inner, row = 1, heads * row
        if tokens == 1 or step[0] == row:
            outer, row = 1, tokens * row
    for i in range(outer):
        for j in range(inner):
            kv = at + i * step[0] + j * step[1]
            if load:
                copy_run(kv, body, row, streaming)
            else:
                copy_run(body, kv, row, streaming)
            body += row


@part_of_kernel
def copy_tokens(
    body: int, base: int, step: Any, extent: Any, token: int, paging: Any, load: bool, streaming: bool
) -> None:
    """Copy `extent[0]` tokens from `token` on between the caller's memory and a body.

    `extent`: tokens, heads, dim, itemsize; `step`: bytes from one token, head, element, page to the next; `paging`: the
    address of the page table, and tokens in a page, 0 when they are not paged.
    """
    table, page_tokens = paging
    tokens, heads, dim, itemsize = extent
    if page_tokens == 0:
        _copy_run_of_tokens(body, base + token * step[0], step, extent, load, streaming)
        return
    done = 0
    while done < tokens:
        inside = (token + done) % page_tokens
        run = min(tokens - done, page_tokens - inside)
        page = load_i64(table + (token + done) // page_tokens * 8)
        at = base + page * step[3] + inside * step[0]
        _copy_run_of_tokens(body, at, step, (run, heads, dim, itemsize), load, streaming)
        body += run * heads * dim * itemsize
        done += run
