"""KV as a cache gives it back."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kvtier.codecs.plan import ByAge, canonical, parse_plan, resolve
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
    if not blocks:
        return kv, 8.0 * spec.itemsize
    parsed = parse_plan(plan)
    if not isinstance(parsed, ByAge):
        return _through(kv, spec, plan, blocks)
    older = max(0, blocks * spec.block_tokens - parsed.recent) // spec.block_tokens
    given, bits = _through(kv, spec, str(parsed.old), older)
    return given, (bits * older + 8 * spec.itemsize * (blocks - older)) / blocks


def stored_heads(kv: KV, held: Sequence[Sequence[int]], spec: KVSpec, plan: str) -> tuple[KV, float]:
    """The same of a context that lost tokens: what each KV head has left is a sequence of its own, in blocks.

    Tokens that fill no block stay as they are, and count as that.

    Args:
        kv: aligned at the end where heads hold different numbers of tokens.
        held: tokens of each KV head of each layer.
        spec: of the model.
        plan: of what is left.
    """
    given = [(keys.clone(), values.clone()) for keys, values in kv]
    alike: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for layer, (its, counts) in enumerate(zip(_by_layer(plan, spec), held, strict=True)):
        for head, count in enumerate(counts):
            alike[its, count].append((layer, head))
    bits = 0.0
    for (its, count), heads in alike.items():
        one = replace(spec, layers=1, kv_heads=len(heads))
        parts = [torch.stack([given[layer][part][-count:, head] for layer, head in heads], 1) for part in (0, 1)]
        back, size = stored([(parts[0], parts[1])], one, its)
        for part, those in enumerate(back[0]):
            for at, (layer, head) in enumerate(heads):
                given[layer][part][-count:, head] = those[:, at]
        whole = count // spec.block_tokens * spec.block_tokens
        bits += len(heads) * (size * whole + 8 * spec.itemsize * (count - whole))
    return given, bits / sum(itertools.chain.from_iterable(held))


def _by_layer(plan: str, spec: KVSpec) -> list[str]:
    """The plan of each layer, as that of a model of one layer."""
    parsed = parse_plan(plan)
    old = parsed.old if isinstance(parsed, ByAge) else parsed
    texts = [canonical((layer,)) for layer in resolve(old, spec)]
    return [str(replace(parsed, old=parse_plan(text))) if isinstance(parsed, ByAge) else text for text in texts]


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
