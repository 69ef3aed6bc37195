"""A caller's memory to bodies whose codes are elements of 16 bits."""

# ruff: noqa: N803, PLR0917 (triton passes arguments by position; those of compile time are in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from kvtier.codecs.gpu.codes import store_codes
from kvtier.codecs.gpu.halves import nearest
from kvtier.codecs.gpu.places import bfloat16_of, fill_up, read, work_of
from kvtier.codecs.gpu.scales import refuse, unsound


@triton.jit(do_not_specialize=["block_count", "job_count", "first_job", "jobs_here"])
def encode_halves(
    memory: tl.tensor,
    blocks: tl.tensor,
    jobs: tl.tensor,
    view: tl.tensor,
    pages: tl.tensor,
    stored: tl.tensor,
    block_count: tl.tensor,
    job_count: tl.tensor,
    first_job: tl.tensor,
    jobs_here: tl.tensor,
    PART: tl.constexpr,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Round `[ROWS, COLUMNS]` of one part of one block."""
    number, where, exact, part, inner = work_of(
        memory, blocks, jobs, block_count, job_count, first_job, jobs_here, PART
    )
    codes, _, _, end, nbytes = inner
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(2) * COLUMNS
    element = first + tl.arange(0, COLUMNS)
    inside = token < PART.tokens - exact
    values, bad = read((view, pages, where), exact + token, inside, element, element < PART.elements, PART, SEEN)
    # What rounds to infinity: from 65520, or half a step above the largest bfloat16, on.
    if PART.form == "fp16":
        bad = bad | unsound(values, 0x477FF000)
        code = nearest(values)
    else:
        bad = bad | unsound(values, 0x7F7F8000)
        code = bfloat16_of(values)
    refuse(stored, number, bad)
    store_codes(
        part + codes + token * PART.row_nbytes, first, PART.row_nbytes // 2 - first, inside, code, 16, ROWS, COLUMNS
    )
    fill_up(part, end, nbytes)
