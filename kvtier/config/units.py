"""Sizes and durations, as people write them."""

from __future__ import annotations

import re
from typing import Self

BYTES = {"": 1, "B": 1}
BYTES |= {f"{prefix}iB": 1 << 10 * (i + 1) for i, prefix in enumerate("KMGT")}
BYTES |= {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("kMGT")}
TOKENS = {"": 1, "k": 1 << 10, "K": 1 << 10, "M": 1 << 20}
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_NUMBER_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Size(int):
    """A number of bytes."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """From "32GiB", "500MB" or a number of bytes.

        Raises:
            ValueError: it is neither.
        """
        number = _times(value, BYTES, allow_bare=True)
        if number is None:
            raise ValueError(f'{value!r} is no size: write a whole number of bytes, or "512MiB", "32GiB"')
        return cls(number)

    def __str__(self) -> str:
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self and self % BYTES[unit] == 0:
                return f"{self // BYTES[unit]}{unit}"
        return f"{int(self)}"


class Duration(float):
    """A number of seconds."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """From "30s", "250ms", "5m" or "1h".

        Raises:
            ValueError: it is none of these.
        """
        number = _times(value, SECONDS, allow_bare=False)
        if number is None:
            raise ValueError(f'{value!r} is no duration: write "250ms", "30s", "5m" or "1h"')
        return cls(number)

    def __str__(self) -> str:
        return f"{round(self * 1000)}ms" if self < 1 else f"{self:g}s"


def tokens(text: str) -> int:
    """A number of tokens, from "32768" or as contexts are named, "32k".

    Raises:
        ValueError: it is neither.
    """
    number = _times(text.replace(",", ""), TOKENS, allow_bare=True)
    if number is None or not number.is_integer():
        raise ValueError(f'{text[:40]!r} is no number of tokens: write "32768", or "32k", which is the same')
    return int(number)


def _times(value: object, units: dict[str, float] | dict[str, int], *, allow_bare: bool) -> float | None:
    """Number times unit; None when it is not written so."""
    if isinstance(value, int) and not isinstance(value, bool) and allow_bare and value >= 0:
        return value
    match = _NUMBER_UNIT.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units or not (match[2] or allow_bare):
        return None
    return float(match[1]) * units[match[2]]
