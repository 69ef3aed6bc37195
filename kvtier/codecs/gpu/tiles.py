"""How large a piece each program takes."""

from __future__ import annotations

from kvtier.codecs.gpu.traits import Stored
from kvtier.codecs.layout import UNIT
from kvtier.errors import ConfigError

TILE = 4096
"""Elements that a program works on at once: 32 a thread."""
WIDE = 128
"""Elements of a row that a program takes where nothing says how many."""


def largest_power(number: int) -> int:
    """The largest power of two that divides it."""
    return number & -number


def power_from(number: int) -> int:
    """The least power of two that is not below it."""
    return 1 << (number - 1).bit_length()


def rows_of(columns: int, tokens: int) -> int:
    """Tokens that a program takes."""
    return min(max(TILE // columns, 1), power_from(tokens))


def plain_tile(parts: Stored) -> tuple[int, int]:
    """Rows and columns where scales do not matter: whole units, and whole runs that are rotated together."""
    columns = max(UNIT, 1 << parts.rotation, min(WIDE, power_from(parts.elements)))
    return rows_of(columns, parts.tokens), columns


def decode_tile(parts: Stored) -> tuple[int, int, bool]:
    """Rows, columns, and whether all columns of a row have the same scale."""
    rows, columns = plain_tile(parts)
    if parts.granularity == "channel" and parts.group < parts.tokens:
        rows = min(rows, largest_power(parts.group))
    if parts.granularity == "row":
        alike = min(largest_power(parts.group), largest_power(parts.dim))
        if alike >= max(UNIT, 1 << parts.rotation):
            return rows_of(alike, parts.tokens), alike, True
    return rows, columns, False


def group_tile(parts: Stored) -> tuple[int, int, int, bool]:
    """Rows, columns, groups in them, and whether groups are whole units, to encode what has scales of its own a token.

    Raises:
        ConfigError: groups that are neither whole rotated runs nor parts of one.
    """
    run, group = 1 << parts.rotation, parts.group
    if group % run == 0:
        columns, groups = power_from(group), 1
    elif run % group == 0:
        columns, groups = run, run // group
    else:
        raise ConfigError(
            f"groups of {group} channels do not fit runs of {run} that are rotated together: the GPU has no kernel for "
            f"it; use a group of {run}"
        )
    whole = parts.dim % UNIT == 0 and (group if groups == 1 else columns) % UNIT == 0
    return rows_of(columns, parts.tokens), columns, groups, whole


def shared_tile(parts: Stored) -> tuple[int, int, int, int]:
    """Rows, columns, how often as many of both, to encode what shares scales between tokens."""
    columns = max(UNIT, 1 << parts.rotation, min(WIDE // 2, power_from(parts.elements)))
    group = min(parts.group, parts.tokens)
    rows = rows_of(columns, group)
    if parts.granularity == "channel":
        return rows, columns, -(-group // rows), 1
    return rows, columns, -(-group // rows), -(-parts.elements // columns)
