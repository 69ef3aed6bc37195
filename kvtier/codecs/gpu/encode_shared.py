"""A caller's memory to bodies, where tokens share scales: a pass that finds them, and one that packs."""

# ruff: noqa: N803, PLR0917 (triton passes arguments by position; those of compile time are in capitals)

from __future__ import annotations

import triton
import triton.language as tl

from kvtier.codecs.gpu.codes import code_of, squared_error, store_codes
from kvtier.codecs.gpu.halves import widened
from kvtier.codecs.gpu.places import fill_up, read, work_of
from kvtier.codecs.gpu.scales import TRIALS, beyond, choose, inverse_of, refuse


@triton.jit
def _choose_least(
    kv: tl.tensor,
    tokens: tl.tensor,
    element: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    shares: tl.tensor,
    PART: tl.constexpr,
    SEEN: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Of each channel the scale and the zero point with the least squared error over tokens, and which have none."""
    first, end = tokens
    trial = tl.arange(0, TRIALS)[:, None]
    share, cut = tl.load(shares + trial), tl.load(shares + TRIALS + trial)
    scale, zero = choose(low[None, :], high[None, :], share, cut, PART)
    size, middle = widened(scale), widened(zero)
    inverse = inverse_of(size)
    error = tl.zeros([TRIALS, COLUMNS], tl.float32)
    for step in range(PART.group):
        one = first + step + tl.arange(0, 1)
        values, _ = read(kv, one, one < end, element, element < PART.elements, PART, SEEN)
        error += tl.where((one < end)[:, None], squared_error(values, size, inverse, middle, PART), 0.0)
    bad = beyond(scale) | beyond(zero)
    error = tl.where(bad, 0.0, error)
    trial = tl.broadcast_to(trial, [TRIALS, COLUMNS])
    least = tl.min(error, axis=0, keep_dims=True)
    chosen = trial == tl.min(tl.where(error == least, trial, TRIALS), axis=0, keep_dims=True)
    scale, zero = tl.sum(tl.where(chosen, scale, 0), axis=0), tl.sum(tl.where(chosen, zero, 0), axis=0)
    return scale, zero, tl.max(bad.to(tl.int32), axis=0) > 0


@triton.jit(do_not_specialize=["block_count", "job_count", "first_job", "jobs_here"])
def encode_shared(
    memory: tl.tensor,
    blocks: tl.tensor,
    jobs: tl.tensor,
    view: tl.tensor,
    pages: tl.tensor,
    table: tl.tensor,
    stored: tl.tensor,
    block_count: tl.tensor,
    job_count: tl.tensor,
    first_job: tl.tensor,
    jobs_here: tl.tensor,
    PART: tl.constexpr,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Encode COLUMNS channels of a group of tokens, each with its scale; or TILES as many, a whole part, with one."""
    number, where, exact, part, inner = work_of(
        memory, blocks, jobs, block_count, job_count, first_job, jobs_here, PART
    )
    codes, scales, zeros, stop, nbytes = inner
    begin, slot = where
    kv = (view, pages, (begin + exact, slot))
    first = tl.program_id(1) * PART.group
    end = tl.minimum(first + PART.group, PART.tokens - exact)
    element = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    low = tl.full([COLUMNS], float("inf"), tl.float32)
    high = tl.full([COLUMNS], float("-inf"), tl.float32)
    bad = tl.zeros([ROWS, COLUMNS], tl.int1)
    for step in range(STEPS):
        for tile in range(TILES):
            token, column = first + step * ROWS + tl.arange(0, ROWS), tile * COLUMNS + element
            inside, within = token < end, column < PART.elements
            values, worse = read(kv, token, inside, column, within, PART, SEEN)
            bad, mask = bad | worse, inside[:, None] & within[None, :]
            low = tl.minimum(low, tl.min(tl.where(mask, values, float("inf")), axis=0))
            high = tl.maximum(high, tl.max(tl.where(mask, values, float("-inf")), axis=0))
    refuse(stored, number, bad)
    if PART.granularity == "tensor":
        low, high = tl.min(low, axis=0) + element * 0.0, tl.max(high, axis=0) + element * 0.0
        index, known = element * 0, element == 0
    else:
        index = tl.program_id(1) * PART.elements + element
        known = element < tl.where(first < end, PART.elements, 0)
        low, high = tl.where(known, low, 0.0), tl.where(known, high, 0.0)
    if PART.clip:
        scale, zero, bad = _choose_least(kv, (first, end), element, low, high, table, PART, SEEN, COLUMNS)
    else:
        scale, zero = choose(low, high, 1.0, 0.0, PART)
        bad = beyond(scale) | beyond(zero)
    refuse(stored, number, bad[None, :])
    tl.store((part + scales).to(tl.pointer_type(tl.uint16)) + index, scale.to(tl.uint16), mask=known)
    if not PART.symmetric:
        tl.store((part + zeros).to(tl.pointer_type(tl.uint16)) + index, zero.to(tl.uint16), mask=known)
    inverse, middle = inverse_of(widened(scale))[None, :], widened(zero)[None, :]
    for step in range(STEPS):
        for tile in range(TILES):
            token, column = first + step * ROWS + tl.arange(0, ROWS), tile * COLUMNS + element
            inside, within = token < end, column < PART.elements
            values, _ = read(kv, token, inside, column, within, PART, SEEN)
            code = code_of(values, inverse, middle, table, PART)
            at = (tile + tl.program_id(2)) * COLUMNS
            rows, count = part + codes + token * PART.row_nbytes, PART.row_nbytes // PART.bits * 8 - at
            store_codes(rows, at, count, inside, tl.where(within, code, PART.zero), PART.bits, ROWS, COLUMNS)
    fill_up(part, stop, nbytes)
