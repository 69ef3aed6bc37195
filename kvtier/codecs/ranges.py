"""Ranges of layers, as plans and recipes have them: `RANGE:what;RANGE:what`.

RANGE := 0-9 (layers, both inclusive) | 7 | 0-5/16 (fractions of the layers, from and to)
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from kvtier.errors import ConfigError

_RANGE = re.compile(r"\s*(\d+(?:/\d+)?)(?:-(\d+(?:/\d+)?))?\s*:(.*)", re.DOTALL)


def split(inner: str) -> list[str]:
    """Cut at the semicolons that are in no bracket."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(inner):
        depth += (letter == "(") - (letter == ")")
        if letter == ";" and not depth:
            parts.append(inner[begin:at])
            begin = at + 1
    return [*parts, inner[begin:]]


def ranged(part: str, text: str) -> tuple[int | Fraction, int | Fraction, str]:
    """Read `RANGE:...`, a part of `text`: the first layer, the one after the last, and what is said of them.

    Raises:
        ConfigError: it is none.
    """
    found = _RANGE.fullmatch(part)
    if not found:
        raise ConfigError(f"{text!r}: {part!r} is no range of layers and its plan; write 0-9:int4, or 0-5/16:int4")
    low, high, inner = found.groups()
    try:
        if high is not None and "/" in low + high:
            first, stop = Fraction(low), Fraction(high)
            if not 0 <= first < stop <= 1:
                raise ConfigError(f"{text!r}: {low}-{high} are no fractions of the layers, from 0 to 1")
            return first, stop, inner
        if int(low) > int(high or low):
            raise ConfigError(f"{text!r}: {low}-{high} are no layers; write the first and the last, as in 0-9:int4")
        return int(low), int(high or low) + 1, inner
    except (ValueError, ZeroDivisionError) as exc:
        raise ConfigError(f"{text!r}: {low} is no layer; write 0-9:int4, or 0-5/16:int4") from exc


def range_text(first: int | Fraction, stop: int | Fraction) -> str:
    """What `ranged` reads."""
    if isinstance(first, int) and isinstance(stop, int):
        return f"{first}-{stop - 1}" if stop - first > 1 else str(first)
    return f"{first}-{stop}"


def bounds(first: int | Fraction, stop: int | Fraction, layers: int) -> tuple[int, int]:
    """Layers that a range is of: whoever gives fractions means all, so 1/3 of 32 rounds, and the next third follows."""
    low, high = (
        edge if isinstance(first, int) else math.floor(edge * layers + Fraction(1, 2)) for edge in (first, stop)
    )
    return int(low), int(high)
