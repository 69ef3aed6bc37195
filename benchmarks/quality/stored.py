"""KV as a cache gives it back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from kvtier.codecs.plan import ByAge, parse_plan
from kvtier.codecs.registry import codec_for
from kvtier.codecs.view import KVView
from kvtier.spec import KVSpec

KV = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""K and V of every layer, each `[tokens, kv_heads, head_dim]`."""
ALIGNMENT = 64
"""Of bodies in slots."""


def stored(kv: KV, spec: KVSpec, plan: str) -> tuple[KV, float]:
    """Encode a context and decode it; what came back, and the bits a value that it took.

    A plan by age is one of caches that belong to one sequence: whole blocks of older tokens as its old plan says, the
    rest as it is.

    Raises:
        ValueError: a block that the plan cannot represent.
    """
    blocks = kv[0][0].shape[0] // spec.block_tokens
    parsed = parse_plan(plan)
    if not isinstance(parsed, ByAge):
        return _through(kv, spec, plan, blocks)
    older = max(0, blocks * spec.block_tokens - parsed.recent) // spec.block_tokens
    given, bits = _through(kv, spec, str(parsed.old), older)
    return given, (bits * older + 8 * spec.itemsize * (blocks - older)) / blocks


def _through(kv: KV, spec: KVSpec, plan: str, blocks: int) -> tuple[KV, float]:
    """The first blocks through a codec, the tokens beyond them exact; bits of those blocks."""
    codec = codec_for(plan, spec)
    given = [(keys.clone(), values.clone()) for keys, values in kv]
    for part in itertools.chain.from_iterable(given):
        part[: blocks * spec.block_tokens] = torch.nan  # what is not decoded will be seen
    sizes = [codec.nbytes(position) for position in range(blocks)]
    offsets = np.array([0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)], np.int64)
    memory = np.zeros(offsets[-1], np.uint8)
    positions = np.arange(blocks, dtype=np.int64)
    tokens, every = positions * spec.block_tokens, range(spec.layers)
    done = codec.encode(KVView.of(kv, spec), tokens, memory, offsets[:-1], positions, every)
    if not done.all():
        raise ValueError(f"{plan} cannot represent {np.count_nonzero(~done)} of {blocks} blocks of this model's KV")
    codec.decode(memory, offsets[:-1], positions, KVView.of(given, spec), tokens, every)
    values = spec.token_nbytes // spec.itemsize * spec.block_tokens
    return given, 8 * sum(sizes) / (values * blocks) if blocks else 0.0
