"""Codecs by plan and by number.

Asking for the first codec compiles all kernels, or loads them from the cache: see `warm`.
"""

from __future__ import annotations

from functools import cache

from kvtier.codecs.base import Codec
from kvtier.codecs.plan import NAMED
from kvtier.errors import UnknownCodec


@cache
def codecs() -> tuple[Codec, ...]:
    """Every codec of this version."""
    from kvtier.codecs.int8 import Int8Codec
    from kvtier.codecs.raw import RawCodec

    return RawCodec(), Int8Codec()


def codec_for(plan: str) -> Codec:
    """Find the codec that carries out a plan, given its name or canonical text.

    Raises:
        UnknownCodec: none does.
    """
    text = NAMED.get(plan, plan)
    for codec in codecs():
        if codec.plan == text:
            return codec
    raise UnknownCodec(f"no codec for the plan {plan!r}; this version has {', '.join(c.plan for c in codecs())}")


def codec_numbered(number: int) -> Codec:
    """Find the codec that a block header names.

    Raises:
        UnknownCodec: this version has none of that number.
    """
    for codec in codecs():
        if codec.number == number:
            return codec
    known = ", ".join(f"{c.number} ({c.plan})" for c in codecs())
    raise UnknownCodec(f"no codec number {number}; this version has {known}")
