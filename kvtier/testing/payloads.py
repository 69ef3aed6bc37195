"""Valid payloads of any size, made from a seed, so that a test can tell later whether bytes are right."""

from __future__ import annotations

import numpy as np
import xxhash

from kvtier.block import ADDRESS_NBYTES, SPACE_NBYTES, BlockHeader, address, header_nbytes

PLAN = "raw"
LEAST_NBYTES = header_nbytes(PLAN)
"""A payload without a body."""


def key_of(seed: int) -> bytes:
    """The 34-byte address of the payload of a seed."""
    return address(b"".join(xxhash.xxh3_128_digest(b"key", seed=2 * seed + half) for half in (0, 1)), seed % 4)


def payload_of(seed: int, nbytes: int) -> bytes:
    """A whole payload of exactly `nbytes`, the same for the same arguments.

    Args:
        seed: which block; its address is `key_of(seed)`.
        nbytes: at least `LEAST_NBYTES`.
    """
    return payload_with(seed, _random(seed, nbytes).bytes(nbytes - LEAST_NBYTES))


def normal_payload_of(seed: int, nbytes: int) -> bytes:
    """Like `payload_of`; its body is normally distributed bfloat16, and so can be packed, as that of KV can."""
    values = _random(seed, nbytes).standard_normal((nbytes - LEAST_NBYTES + 1) // 2, np.float32)
    return payload_with(seed, (values.view(np.uint32) >> 16).astype("<u2").tobytes()[: nbytes - LEAST_NBYTES])


def payload_with(seed: int, body: bytes) -> bytes:
    """The payload of a seed with this body."""
    key = key_of(seed)
    header = BlockHeader(
        key=key[: ADDRESS_NBYTES - 2],
        rank=seed % 4,
        position=seed % 1000,
        tokens=64,
        codec=1,
        plan=PLAN,
        spec_digest=xxhash.xxh3_128_digest(b"spec") * 2,
        body_nbytes=len(body),
        checksum=xxhash.xxh3_64_intdigest(body),
        space=key[:SPACE_NBYTES],
        expires=(1 << 40) + seed,
    )
    return header.pack() + body


def _random(seed: int, nbytes: int) -> np.random.Generator:
    if nbytes < LEAST_NBYTES:
        raise ValueError(f"a payload has at least {LEAST_NBYTES} bytes, not {nbytes}")
    return np.random.Generator(np.random.SFC64([seed, nbytes]))
