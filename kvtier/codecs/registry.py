"""Codecs by plan and spec, and by what a block header says.

Asking for the first codec compiles all kernels, or loads them from the cache: see `warm`.
"""

from __future__ import annotations

from functools import cache

from kvtier.block import BlockHeader
from kvtier.codecs.base import Codec
from kvtier.codecs.plan import canonical_plan
from kvtier.errors import ConfigError, CorruptPayload, UnknownCodec
from kvtier.spec import KVSpec

NUMBERS = (3,)
"""Of codecs that this version has. 1 and 2 were codecs of `raw` and of `int8` per token, before plans."""


def codec_for(plan: str, spec: KVSpec) -> Codec:
    """Find the codec that carries out a plan, given its name or text, for blocks of a spec.

    Raises:
        ConfigError: no such plan, or one that blocks of this spec cannot follow.
    """
    return _codec(canonical_plan(plan, spec), spec)


@cache
def _codec(plan: str, spec: KVSpec) -> Codec:
    from kvtier.codecs.cpu.codec import PlanCodec

    return PlanCodec(plan, spec)


def codec_of(header: BlockHeader, spec: KVSpec) -> Codec:
    """Find the codec that a block's header names: it and the spec are all that a reader needs.

    Raises:
        UnknownCodec: this version cannot read it, or the block is not of this spec.
        CorruptPayload: its sizes are not those of its plan.
    """
    if header.codec not in NUMBERS:
        known = ", ".join(str(number) for number in NUMBERS)
        raise UnknownCodec(f"no codec number {header.codec}; this version has {known}")
    if header.spec_digest != spec.digest:
        raise UnknownCodec(f"the block's spec is {header.spec_digest.hex()[:16]}, and not {spec}")
    try:
        codec = codec_for(header.plan, spec)
    except ConfigError as exc:
        raise UnknownCodec(f"a block has a plan that this version cannot read: {exc}") from exc
    if (header.tokens, header.body_nbytes) != (spec.block_tokens, codec.nbytes(header.position)):
        raise CorruptPayload(
            f"a block says that it has {header.tokens} tokens and {header.body_nbytes} bytes; of its plan and spec it "
            f"would have {spec.block_tokens} and {codec.nbytes(header.position)}"
        )
    return codec
