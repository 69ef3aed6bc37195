"""Where a program works: its block, its part of a layer, and the caller's elements."""

# ruff: noqa: N803, N806, PLR0917 (triton passes arguments by position; those of compile time are in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from kvtier.codecs.gpu.sums import rotate

ALIGN = tl.constexpr(16)
"""Bodies begin at multiples of this many bytes."""
COLUMNS_OF_JOB = tl.constexpr(8)
"""Of the table of `jobs`."""
COLUMNS_OF_VIEW = tl.constexpr(5)
"""Of the table of `view`."""
FILLER = tl.constexpr(64)
"""More bytes than follow the end of a part."""


@triton.jit
def work_of(
    memory: tl.tensor,
    blocks: tl.tensor,
    jobs: tl.tensor,
    block_count: tl.tensor,
    job_count: tl.tensor,
    first_job: tl.tensor,
    jobs_here: tl.tensor,
    PART: tl.constexpr,
) -> tl.tensor:
    """What a program is to do: axis 0 of the grid counts blocks, and in them `jobs_here` jobs from `first_job` on.

    Returns:
        The block's number; its first token and the number of the part, which say where in the caller's KV; how many
        tokens are exact; the address of the part in the body; (where in it codes, scales, zero points and its end are).
    """
    ALIGNED: tl.constexpr = PART.aligned
    number = tl.program_id(0) // jobs_here
    offset, later = (
        tl.multiple_of(tl.load(blocks + block_count + number), ALIGN),
        tl.load(blocks + 2 * block_count + number),
    )
    at = jobs + (later * job_count + first_job + tl.program_id(0) % jobs_here) * COLUMNS_OF_JOB
    where = (tl.load(blocks + number), tl.load(at))
    part, codes = tl.multiple_of(tl.load(at + 1), ALIGNED), tl.multiple_of(tl.load(at + 3), ALIGNED)
    scales, zeros = tl.multiple_of(tl.load(at + 4), ALIGNED), tl.multiple_of(tl.load(at + 5), ALIGNED)
    return (
        number,
        where,
        tl.load(at + 2),
        memory + offset + part,
        (codes, scales, zeros, tl.load(at + 6), tl.load(at + 7)),
    )


@triton.jit
def kv_at(
    kv: tl.tensor,
    tokens: tl.tensor,
    inside: tl.tensor,
    elements: tl.tensor,
    PART: tl.constexpr,
    SEEN: tl.constexpr,
) -> tl.tensor:
    """Pointers to `[tokens, elements]` of the caller's KV; `inside`: which of the tokens there are.

    `kv`: the table of a view, its pages, and where in it.
    """
    view, pages, where = kv
    begin, slot = where
    at = view + slot * COLUMNS_OF_VIEW
    base = tl.load(at).to(tl.pointer_type(SEEN.element))
    by_token, by_head, by_element, by_page = tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    if SEEN.nbytes > SEEN.element.primitive_bitwidth // 8:
        NBYTES: tl.constexpr = SEEN.nbytes
        ELEMENTS: tl.constexpr = SEEN.nbytes * 8 // SEEN.element.primitive_bitwidth
        base = tl.multiple_of(base, NBYTES)
        by_token, by_head = tl.multiple_of(by_token, ELEMENTS), tl.multiple_of(by_head, ELEMENTS)
        by_page = tl.multiple_of(by_page, ELEMENTS)
    tokens = begin + tokens
    if SEEN.page_tokens:
        page = tl.load(pages + tokens // SEEN.page_tokens, mask=inside, other=0)
        rows = page * by_page + tokens % SEEN.page_tokens * by_token
    else:
        rows = tokens * by_token
    columns = elements % PART.dim
    if not SEEN.dense:
        columns = columns * by_element
    return base + rows[:, None] + (elements // PART.dim * by_head + columns)[None, :]


@triton.jit
def read(
    kv: tl.tensor,
    tokens: tl.tensor,
    inside: tl.tensor,
    elements: tl.tensor,
    within: tl.tensor,
    PART: tl.constexpr,
    SEEN: tl.constexpr,
) -> tl.tensor:
    """Rotated float32 `[tokens, elements]` of the caller's KV, and which of them are infinite or NaN; these are 0 then.

    So is what `inside` or `within` say is not there.
    """
    at = kv_at(kv, tokens, inside, elements, PART, SEEN)
    values = tl.load(at, mask=inside[:, None] & within[None, :], other=0).to(tl.float32)
    values = rotate(values, values.shape[0], values.shape[1], PART.rotation)
    bad = (values.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
    return tl.where(bad, 0.0, values), bad


@triton.jit
def narrowed(values: tl.tensor, SEEN: tl.constexpr) -> tl.tensor:
    """Round float32 to the KV's dtype, to nearest even; what is beyond a float16's range becomes its largest."""
    if SEEN.element == tl.bfloat16:
        if SEEN.native:
            values = values.to(tl.bfloat16)
        else:
            values = bfloat16_of(values).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if SEEN.element == tl.float16:
        values = tl.minimum(tl.maximum(values, -65504.0), 65504.0).to(tl.float16)
    return values


@triton.jit
def bfloat16_of(values: tl.tensor) -> tl.tensor:
    """Bits of the nearest bfloat16, ties to even."""
    bits = values.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x7FC00000)
    return ((size + 0x7FFF + ((size >> 16) & 1)) >> 16) | ((bits >> 16) & 0x8000)


@triton.jit
def fill_up(part: tl.tensor, end: tl.tensor, nbytes: tl.tensor) -> None:
    """Zero what is behind the end of a part; one program of it does."""
    place = end + tl.arange(0, FILLER)
    stop = tl.where(tl.program_id(1) + tl.program_id(2) == 0, nbytes, 0)
    tl.store(part + place, tl.zeros([FILLER], tl.uint8), mask=place < stop)
