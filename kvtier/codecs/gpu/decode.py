"""Bodies to a caller's memory: one pass, a tile at a time."""

# ruff: noqa: N803, PLR0917 (triton passes arguments by position; those of compile time are in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from kvtier.codecs.gpu.codes import load_codes, value_of
from kvtier.codecs.gpu.halves import widened
from kvtier.codecs.gpu.places import kv_at, narrowed, work_of
from kvtier.codecs.gpu.sums import rotate


@triton.jit(do_not_specialize=["block_count", "job_count", "first_job", "jobs_here"])
def decode(
    memory: tl.tensor,
    blocks: tl.tensor,
    jobs: tl.tensor,
    view: tl.tensor,
    pages: tl.tensor,
    levels: tl.tensor,
    block_count: tl.tensor,
    job_count: tl.tensor,
    first_job: tl.tensor,
    jobs_here: tl.tensor,
    PART: tl.constexpr,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIKE: tl.constexpr,
) -> None:
    """Decode `[ROWS, COLUMNS]` of one part of one block; ALIKE: all columns of a row have the same scale."""
    _, where, exact, part, inner = work_of(memory, blocks, jobs, block_count, job_count, first_job, jobs_here, PART)
    codes, scales, zeros, _, _ = inner
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(2) * COLUMNS
    element = first + tl.arange(0, COLUMNS)
    inside = token < PART.tokens - exact
    within = element < PART.elements
    mask = inside[:, None] & within[None, :]
    rows = part + codes + token * PART.row_nbytes
    value = value_of(load_codes(rows, first, PART.elements - first, inside, PART.bits, ROWS, COLUMNS), levels, PART)
    if PART.granularity != "none":
        scale, zero = (part + scales).to(tl.pointer_type(tl.uint16)), (part + zeros).to(tl.pointer_type(tl.uint16))
        if PART.granularity == "tensor":
            size, middle = widened(tl.load(scale)), widened(tl.load(zero))
        elif PART.granularity == "channel":
            # A tile's tokens are all of one group, if there are any.
            index = tl.program_id(1) * ROWS // PART.group * PART.elements + element
            known = element < tl.where(tl.program_id(1) * ROWS < PART.tokens - exact, PART.elements, 0)
            size = widened(tl.load(scale + index, mask=known, other=0))[None, :]
            middle = widened(tl.load(zero + index, mask=known, other=0))[None, :]
        elif ALIKE:
            group = first // PART.dim * PART.groups + first % PART.dim // PART.group
            index = token * (PART.heads * PART.groups) + group
            size = widened(tl.load(scale + index, mask=inside, other=0))[:, None]
            middle = widened(tl.load(zero + index, mask=inside, other=0))[:, None]
        else:
            group = element // PART.dim * PART.groups + element % PART.dim // PART.group
            index = (token * (PART.heads * PART.groups))[:, None] + group[None, :]
            size = widened(tl.load(scale + index, mask=mask, other=0))
            middle = widened(tl.load(zero + index, mask=mask, other=0))
        value = value * size
        if not PART.symmetric:
            value = value + middle
        elif PART.form != "lloyd":
            # Not -0.
            value = value + 0.0
        value = rotate(value, ROWS, COLUMNS, PART.rotation)
    kv = kv_at((view, pages, where), exact + token, inside, element, PART, SEEN)
    tl.store(kv, narrowed(value, SEEN), mask=mask)
