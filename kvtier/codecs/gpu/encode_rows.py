"""A caller's memory to bodies, where each head, or group of channels, of a token has a scale of its own."""

# ruff: noqa: N803, PLR0917 (triton passes arguments by position; those of compile time are in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from kvtier.codecs.gpu.codes import load_codes, store_codes
from kvtier.codecs.gpu.places import fill_up, read, work_of
from kvtier.codecs.gpu.scales import quantise, refuse


@triton.jit(do_not_specialize=["block_count", "job_count", "first_job", "jobs_here"])
def encode_rows(
    memory: tl.tensor,
    blocks: tl.tensor,
    jobs: tl.tensor,
    view: tl.tensor,
    pages: tl.tensor,
    table: tl.tensor,
    stored: tl.tensor,
    apart: tl.tensor,
    block_count: tl.tensor,
    job_count: tl.tensor,
    first_job: tl.tensor,
    jobs_here: tl.tensor,
    PART: tl.constexpr,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Encode ROWS tokens of one group, or of GROUPS that are rotated together.

    WHOLE: these are whole units, and their codes go into the body; else a byte each to `apart`, for `pack`.
    """
    number, where, exact, part, inner = work_of(
        memory, blocks, jobs, block_count, job_count, first_job, jobs_here, PART
    )
    codes, scales, zeros, end, nbytes = inner
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = token < PART.tokens - exact
    column = tl.arange(0, COLUMNS)
    if GROUPS > 1:
        first = tl.program_id(2) * COLUMNS
        count = COLUMNS
    else:
        group = tl.program_id(2) % PART.groups * PART.group
        first = tl.program_id(2) // PART.groups * PART.dim + group
        count = tl.minimum(PART.group, PART.dim - group)
    values, bad = read((view, pages, where), exact + token, inside, first + column, column < count, PART, SEEN)
    refuse(stored, number, bad)
    values = tl.reshape(values, [ROWS * GROUPS, COLUMNS // GROUPS])
    valid = tl.broadcast_to((column < count)[None, :], [ROWS, COLUMNS])
    valid = tl.reshape(valid, [ROWS * GROUPS, COLUMNS // GROUPS])
    code, scale, zero, bad = quantise(values, valid, table, PART, ROWS * GROUPS, COLUMNS // GROUPS)
    refuse(stored, number, bad[:, None])
    code = tl.reshape(code, [ROWS, COLUMNS])
    if WHOLE:
        rows = part + codes + token * PART.row_nbytes
        store_codes(rows, first, count, inside, code, PART.bits, ROWS, COLUMNS)
    else:
        rows = apart + (tl.program_id(0) * PART.tokens + token).to(tl.int64) * PART.elements
        store_codes(rows, first, count, inside, code, 8, ROWS, COLUMNS)
    index = token * (PART.heads * PART.groups) + tl.program_id(2) * GROUPS
    index = index[:, None] + tl.arange(0, GROUPS)[None, :]
    scale = tl.reshape(scale, [ROWS, GROUPS]).to(tl.uint16)
    tl.store((part + scales).to(tl.pointer_type(tl.uint16)) + index, scale, mask=inside[:, None])
    if not PART.symmetric:
        zero = tl.reshape(zero, [ROWS, GROUPS]).to(tl.uint16)
        tl.store((part + zeros).to(tl.pointer_type(tl.uint16)) + index, zero, mask=inside[:, None])
    fill_up(part, end, nbytes)


@triton.jit(do_not_specialize=["block_count", "job_count", "first_job", "jobs_here"])
def pack(
    memory: tl.tensor,
    blocks: tl.tensor,
    jobs: tl.tensor,
    apart: tl.tensor,
    block_count: tl.tensor,
    job_count: tl.tensor,
    first_job: tl.tensor,
    jobs_here: tl.tensor,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Pack what `encode_rows` left in `apart`."""
    _, _, exact, part, inner = work_of(memory, blocks, jobs, block_count, job_count, first_job, jobs_here, PART)
    codes, _, _, _, _ = inner
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(2) * COLUMNS
    inside = token < PART.tokens - exact
    rows = apart + (tl.program_id(0) * PART.tokens + token).to(tl.int64) * PART.elements
    code = load_codes(rows, first, PART.elements - first, inside, 8, ROWS, COLUMNS)
    code = tl.where((first + tl.arange(0, COLUMNS) < PART.elements)[None, :], code, PART.zero)
    rows = part + codes + token * PART.row_nbytes
    store_codes(rows, first, PART.row_nbytes // PART.bits * 8 - first, inside, code, PART.bits, ROWS, COLUMNS)
