"""Elements as they are, between a caller's memory and bodies."""

# ruff: noqa: N803, PLR0917 (triton passes arguments by position; those of compile time are in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from kvtier.codecs.gpu.places import kv_at, work_of


@triton.jit(do_not_specialize=["block_count", "job_count", "first_job", "jobs_here"])
def copy(
    memory: tl.tensor,
    blocks: tl.tensor,
    jobs: tl.tensor,
    view: tl.tensor,
    pages: tl.tensor,
    block_count: tl.tensor,
    job_count: tl.tensor,
    first_job: tl.tensor,
    jobs_here: tl.tensor,
    PART: tl.constexpr,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOAD: tl.constexpr,
) -> None:
    """Copy `[ROWS, COLUMNS]` of the exact tokens of one part of one block; LOAD: out of the body, else into it."""
    _, where, exact, part, _ = work_of(memory, blocks, jobs, block_count, job_count, first_job, jobs_here, PART)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    element = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = token < exact
    mask = inside[:, None] & (element < PART.elements)[None, :]
    kv = kv_at((view, pages, where), token, inside, element, PART, SEEN).to(tl.pointer_type(SEEN.word), bitcast=True)
    body = part.to(tl.pointer_type(SEEN.word)) + token[:, None] * PART.elements + element[None, :]
    if LOAD:
        tl.store(kv, tl.load(body, mask=mask), mask=mask)
    else:
        tl.store(body, tl.load(kv, mask=mask), mask=mask)
