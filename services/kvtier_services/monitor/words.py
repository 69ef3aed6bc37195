"""Sizes and times in words."""

from __future__ import annotations

from kvtier.config.units import BYTES


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes >= BYTES[unit]:
            return f"{nbytes / BYTES[unit]:.1f} {unit}"
    return f"{nbytes:.0f} B"


def age(seconds: float) -> str:
    """A time span for people; none where clocks differ and it would be negative."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
