"""The exact KV of a prompt: what is stored of it, and storing the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.client.pools import Pools
from kvtier.client.save import Saved
from kvtier.client.space import Space
from kvtier.errors import KVMismatch, UsageError
from kvtier.flow.rows import Part
from kvtier.spec import KVSpec

KV = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""K and V of every layer, each `[tokens, kv_heads, dim]`."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What was loaded of a prompt.

    Attributes:
        tokens: how many.
        save: stores the blocks behind them: given the prompt's tokens and its KV, all of it exact.
    """

    tokens: int
    save: Callable[[torch.Tensor, KV], list[Future[Saved]]]


def load(
    source: Space | Pools, spec: KVSpec, ids: torch.Tensor, most: int, public: int, wait: float
) -> tuple[Prefix, list[Part]]:
    """Load the longest stored prefix.

    Args:
        source: a space; or a public pool and a session's own blocks.
        spec: of the KV.
        ids: the prompt's tokens.
        most: how many of them may be loaded.
        public: how many first tokens may be shared with everybody; for pools.
        wait: seconds that it may take when blocks must first be brought up from another tier.

    Returns:
        What was loaded, and K and V of each layer, `[kv_heads, tokens, dim]`; none when there is nothing.
    """
    if isinstance(source, Pools):
        parts = _room(spec, most)
        pooled = source.load(ids, _by_token(parts), public, most=most, wait=wait)
        return Prefix(pooled.tokens, lambda ids, kv: source.save(ids, kv, pooled)), _first(parts, pooled.tokens)
    with source.match(ids[:most], wait=wait) as hit:
        parts = _room(spec, hit.tokens)
        tokens = hit.load(_by_token(parts)) if hit.tokens else 0
    return Prefix(tokens, lambda ids, kv: [source.save(ids, kv, start=tokens, after=hit)]), _first(parts, tokens)


def save(prefix: Prefix, ids: torch.Tensor, parts: Sequence[Part]) -> list[Future[Saved]]:
    """Store what was computed of a prompt behind its prefix; `parts` as there, of all its tokens."""
    return prefix.save(ids, _by_token(parts))


def require(model: Any, source: Space | Pools) -> None:
    """Check that a space, or a public pool, is of exact KV of this model's shape.

    Raises:
        KVMismatch: it is of another shape.
        UsageError: it is not exact.
    """
    keyspace = (source.public if isinstance(source, Pools) else source).keyspace
    require_shape(model, keyspace.spec)
    if keyspace.plan != "raw" or keyspace.recipe:
        raise UsageError(
            f"the space has the plan {keyspace.plan!r}, and a flow would quantise again what it gives; make one with "
            "plan='raw'"
        )


def require_shape(model: Any, spec: KVSpec) -> None:
    """Check that a space's spec is of this model's shape and dtype.

    Raises:
        KVMismatch: it is of another.
    """
    found = KVSpec.from_hf(model.config, dtype=model.dtype, block_tokens=spec.block_tokens)
    if found != spec:
        raise KVMismatch(f"the model's KV is {found}; the space was made for {spec}")


def _room(spec: KVSpec, tokens: int) -> list[Part]:
    dtype, heads = getattr(torch, spec.dtype), spec.kv_heads
    return [
        (
            torch.empty(heads, tokens, spec.head_dim, dtype=dtype),
            torch.empty(heads, tokens, spec.v_head_dim, dtype=dtype),
        )
        for _ in range(spec.layers)
    ]


def _by_token(parts: Sequence[Part]) -> KV:
    return [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in parts]


def _first(parts: Sequence[Part], tokens: int) -> list[Part]:
    return [(keys[:, :tokens], values[:, :tokens]) for keys, values in parts] if tokens else []
