"""What bodies mean, in plain numpy: slow, and written to be read. Tests hold every kernel to it, bit for bit.

16-bit elements are arrays of uint16 (their bits), float32 elements arrays of float32. All arithmetic is float32, each
operation rounded to nearest even; sums have the order that is written here. `layout` says where things lie, `codec`
what the error is at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.codecs.codebook import LEVELS, MIDPOINTS
from kvtier.codecs.formats import from_float8, from_float32, pack, round_down, round_up, to_float8, to_float32, unpack
from kvtier.codecs.layout import Field, layout
from kvtier.codecs.plan import parse_plan, resolve
from kvtier.codecs.scheme import LARGEST, Scheme
from kvtier.spec import KVSpec

Parts = Sequence[NDArray[Any]]
"""K and V of one layer of one block, each `[block_tokens, kv_heads, dim]` (MLA: the latent alone)."""
Floats = NDArray[np.float32]
CLIPS = [np.float32(1 - 0.08 * i) for i in range(8)]
"""Shares of the range that `clip` tries."""
SUMMED = 16
"""Sums over a row: element i is added to sum i % 16; then the upper half of the sums to the lower, until one is
left."""


def encode(spec: KVSpec, plan: str, position: int, layers: Sequence[Parts]) -> bytes | None:
    """The body of one block; None if the plan cannot hold it."""
    plans = resolve(parse_plan(plan), spec)
    where = layout(plans, spec, first=position == 0)
    body = bytearray(where.nbytes)
    for parts, layer, rows in zip(layers, plans, where.table, strict=True):
        for part, scheme, row in zip(parts, layer.schemes, rows, strict=True):
            at = int(row[Field.OFFSET])
            encoded = _encode_part(spec.dtype, scheme, part, row)
            if encoded is None:
                return None
            body[at : at + len(encoded)] = encoded
    return bytes(body)


def decode(spec: KVSpec, plan: str, position: int, body: bytes) -> list[list[NDArray[Any]]]:
    """The layers that a body holds, as the kernels give them."""
    plans = resolve(parse_plan(plan), spec)
    where = layout(plans, spec, first=position == 0)
    layers: list[list[NDArray[Any]]] = []
    for layer, rows in zip(plans, where.table, strict=True):
        layers.append([])
        for scheme, row, dim in zip(layer.schemes, rows, spec.head_dims, strict=True):
            at = int(row[Field.OFFSET])
            shape = (spec.block_tokens, spec.kv_heads, dim)
            layers[-1].append(_decode_part(spec.dtype, scheme, body[at : at + int(row[Field.NBYTES])], row, shape))
    return layers


def _encode_part(dtype: str, scheme: Scheme, part: NDArray[Any], row: NDArray[np.int64]) -> bytes | None:
    if scheme.precision == "raw":
        return np.ascontiguousarray(part).tobytes()
    sinks = int(row[Field.SINKS])
    values = to_float32(dtype, part[sinks:])
    body = np.ascontiguousarray(part[:sinks]).tobytes().ljust(int(row[Field.CODES]), b"\0")
    if not np.isfinite(values).all():
        return None
    if scheme.exact:
        stored = from_float32({"bf16": "bfloat16", "fp16": "float16"}[scheme.precision], values)
        with np.errstate(over="ignore"):
            beyond = np.isinf(
                values.astype(np.float16) if scheme.precision == "fp16" else to_float32("bfloat16", stored)
            )
        if beyond.any():
            return None
        return body + pack(stored.reshape(len(values), -1), 16)
    with np.errstate(all="ignore"):
        encoded = _quantise(scheme, rotate(values, int(row[Field.ROTATION])))
    if encoded is None:
        return None
    codes, scales, zeros = encoded
    body += pack(codes.reshape(len(values), -1), scheme.bits, zero=_code_of_zero(scheme)) + scales.tobytes()
    return body if scheme.symmetric else body + zeros.tobytes()


def _decode_part(
    dtype: str, scheme: Scheme, body: bytes, row: NDArray[np.int64], shape: tuple[int, int, int]
) -> NDArray[Any]:
    element = np.dtype(np.float32 if dtype == "float32" else np.uint16)
    tokens, heads, dim = shape
    if scheme.precision == "raw":
        return np.frombuffer(body, element).reshape(shape)
    sinks = int(row[Field.SINKS])
    exact = np.frombuffer(body, element, sinks * heads * dim).reshape(sinks, heads, dim)
    rest = (tokens - sinks, heads, dim)
    at = int(row[Field.CODES])
    codes = unpack(body[at : at + rest[0] * int(row[Field.ROW_NBYTES])], scheme.bits, rest[0], heads * dim).reshape(
        rest
    )
    if scheme.exact:
        values = to_float32({"bf16": "bfloat16", "fp16": "float16"}[scheme.precision], codes.astype(np.uint16))
    else:
        count = int(np.prod(_shared(scheme, rest)))
        scales = np.frombuffer(body, np.float16, count, int(row[Field.SCALES]))
        zeros = None if scheme.symmetric else np.frombuffer(body, np.float16, count, int(row[Field.ZEROS]))
        values = _dequantise(scheme, codes, scales, zeros)
        values = rotate(values, int(row[Field.ROTATION]))
    return np.concatenate([exact, from_float32(dtype, values)])


def _shared(scheme: Scheme, shape: tuple[int, int, int]) -> tuple[int, ...]:
    """The shape of the scales: groups of tokens or of channels that share one."""
    tokens, heads, dim = shape
    if scheme.granularity == "tensor":
        return (1, 1, 1)
    if scheme.granularity == "channel":
        return (-(-tokens // scheme.group), heads, dim)
    return (tokens, heads, -(-dim // min(scheme.group or dim, dim)))


def _spread(scheme: Scheme, shared: NDArray[Any], shape: tuple[int, int, int]) -> NDArray[Any]:
    """What each element's group has, for each element."""
    if scheme.granularity == "tensor":
        return np.broadcast_to(shared, shape)
    if scheme.granularity == "channel":
        return np.repeat(shared, scheme.group, axis=0)[: shape[0]]
    return np.repeat(shared, min(scheme.group or shape[2], shape[2]), axis=2)[:, :, : shape[2]]


def _grouped(scheme: Scheme, values: Floats, filler: float) -> Floats:
    """Values as `[..., elements of one group]`, groups as `_shared` has them, short ones filled up."""
    tokens, heads, dim = values.shape
    if scheme.granularity == "tensor":
        return values.reshape(1, 1, 1, -1)
    if scheme.granularity == "channel":
        filled = np.full((-(-tokens // scheme.group) * scheme.group, heads, dim), filler, np.float32)
        filled[:tokens] = values
        return filled.reshape(-1, scheme.group, heads, dim).transpose(0, 2, 3, 1)
    group = min(scheme.group or dim, dim)
    filled = np.full((tokens, heads, -(-dim // group) * group), filler, np.float32)
    filled[:, :, :dim] = values
    return filled.reshape(tokens, heads, -1, group)


def _quantise(
    scheme: Scheme, values: Floats
) -> tuple[NDArray[np.int64], NDArray[np.float16], NDArray[np.float16]] | None:
    if scheme.lloyd:
        return _quantise_lloyd(scheme, values)
    low, high = _grouped(scheme, values, np.inf).min(axis=-1), _grouped(scheme, values, -np.inf).max(axis=-1)
    best: Any = None
    for share in CLIPS if scheme.clip else CLIPS[:1]:
        found = _scale(scheme, low, high, share)
        if found is None:
            return None
        codes = _codes(scheme, values, *found)
        if not scheme.clip:
            return codes, *found
        error = _dequantise(scheme, codes, *found) - values
        error = _sum_of_squares(scheme, error)
        if best is None:
            best = [codes, *found, error]
            continue
        better = error < best[3]
        spread = _spread(scheme, better, values.shape)
        each: tuple[Any, ...] = (codes, *found, error)
        which = (spread, better, better, better)
        best = [np.where(w, new, old) for w, new, old in zip(which, each, best, strict=True)]
    return best[0], best[1], best[2]


def _scale(
    scheme: Scheme, low: Floats, high: Floats, share: np.float32
) -> tuple[NDArray[np.float16], NDArray[np.float16]] | None:
    """Scale and zero point of groups, from the least and the greatest value of each; None if some group has none.

    Integers: the zero point is the least value rounded down to a float16, the scale what reaches the greatest from
    there in the steps that there are, rounded up; without a zero point the scale reaches the largest magnitude. So
    every code is in range. Floats: the zero point is the middle.
    """
    zero = np.zeros(low.shape, np.float16)
    if scheme.clip:
        cut = (high - low) * np.float32(0.5 * (1 - share)) if not scheme.symmetric else np.float32(0)
        low, high = low + cut, high - cut
    if scheme.integer and not scheme.symmetric:
        zero = round_down(low)
        reach, steps = high - zero.astype(np.float32), 2**scheme.bits - 1
    else:
        if not scheme.symmetric:
            zero = (low * np.float32(0.5) + high * np.float32(0.5)).astype(np.float16) + np.float16(0)
            low, high = low - zero.astype(np.float32), high - zero.astype(np.float32)
        reach = np.maximum(np.abs(low), np.abs(high))
        steps = 2 ** (scheme.bits - 1) - 1 if scheme.integer else LARGEST[scheme.precision]
        if scheme.clip:
            reach = reach * share
    scale = round_up(reach / np.float32(steps))
    return (scale, zero) if np.isfinite(scale).all() and np.isfinite(zero).all() else None


def _codes(
    scheme: Scheme, values: Floats, scales: NDArray[np.float16], zeros: NDArray[np.float16]
) -> NDArray[np.int64]:
    """Nearest codes: `rint((x - zero) / scale)`, the division as a multiplication by the rounded inverse."""
    scale, zero = (_spread(scheme, v.astype(np.float32), values.shape) for v in (scales, zeros))
    scaled = (values - zero) * _inverse(scale)
    if not scheme.integer:
        return to_float8(scheme.precision, scaled)
    least = 0 if not scheme.symmetric else 1 - 2 ** (scheme.bits - 1)
    most = 2**scheme.bits - 1 if not scheme.symmetric else -least
    return np.rint(np.clip(scaled, least, most)).astype(np.int64) + _code_of_zero(scheme)


def _code_of_zero(scheme: Scheme) -> int:
    return 2 ** (scheme.bits - 1) if scheme.symmetric and scheme.precision not in LARGEST else 0


def _quantise_lloyd(
    scheme: Scheme, values: Floats
) -> tuple[NDArray[np.int64], NDArray[np.float16], NDArray[np.float16]] | None:
    """Nearest levels of a row over its root mean square; the scale gives the row its length again.

    The scale with the least squared error would be smaller and make all of V shorter: what attention sums over many
    tokens keeps that error, while the others' cancel. At 2 bits it doubles a model's loss.
    """
    squares = _sum(values * values)
    scaled = values * _inverse(np.sqrt(squares / np.float32(values.shape[-1])))[..., None]
    if not np.isfinite(squares).all():
        return None
    above = (np.abs(scaled)[..., None] > MIDPOINTS[scheme.bits]).sum(axis=-1)
    half = 2 ** (scheme.bits - 1)
    codes = np.where(scaled < 0, half - 1 - above, half + above)
    level = _levels(scheme.bits)[codes]
    scales = np.sqrt(squares / _sum(level * level))[..., None].astype(np.float16)
    return (codes, scales, scales) if np.isfinite(scales).all() else None


def _levels(bits: int) -> Floats:
    return np.concatenate([-LEVELS[bits][::-1], LEVELS[bits]])


def _dequantise(
    scheme: Scheme, codes: NDArray[np.int64], scales: NDArray[np.float16], zeros: NDArray[np.float16] | None
) -> Floats:
    shape = codes.shape
    shared = _shared(scheme, shape)
    scale = _spread(scheme, scales.astype(np.float32).reshape(shared), shape)
    zero = np.float32(0) if zeros is None else _spread(scheme, zeros.astype(np.float32).reshape(shared), shape)
    if scheme.lloyd:
        return _levels(scheme.bits)[codes] * scale
    if not scheme.integer:
        return from_float8(scheme.precision, codes) * scale + zero
    return (codes - _code_of_zero(scheme)).astype(np.float32) * scale + zero


def _sum(values: Floats) -> Floats:
    """Sum over the last axis in the order that `SUMMED` says."""
    count = -(-values.shape[-1] // SUMMED)
    filled = np.zeros((*values.shape[:-1], count * SUMMED), np.float32)
    filled[..., : values.shape[-1]] = values
    sums = np.zeros((*values.shape[:-1], SUMMED), np.float32)
    for i in range(count):
        sums = sums + filled[..., i * SUMMED : (i + 1) * SUMMED]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def _sum_of_squares(scheme: Scheme, error: Floats) -> Floats:
    grouped = _grouped(scheme, error * error, 0)
    if scheme.granularity != "channel":
        return _sum(grouped)
    total = np.zeros(grouped.shape[:-1], np.float32)
    for token in range(grouped.shape[-1]):
        total = total + grouped[..., token]
    return total


def rotate(values: Floats, size: int) -> Floats:
    """Multiply each run of `size` channels by the Hadamard matrix over its root; sums of neighbours first."""
    if size < 2:
        return values
    step = 1
    while step < size:
        pairs = values.reshape(-1, 2, step)
        values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(values.shape)
        step *= 2
    return values * np.float32(size**-0.5)


def _inverse(scale: Floats) -> Floats:
    return np.where(scale > 0, np.float32(1) / scale, np.float32(0))
