"""The stored prefixes of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.client.scope import Chain
from kvtier.client.space import Space
from kvtier.connectors.transformers.forward import cache_argument, forward_parameters
from kvtier.connectors.transformers.prompts import Prompts

Layers = list[list[torch.Tensor]]
"""For each layer K and V, `[rows, kv_heads, columns, head_dim]`."""
CALL = 64
"""A call of the model costs about as much as this many tokens more in another."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded of some prompts.

    Attributes:
        layers: their KV in CPU memory, from column `origin` on; of several rows all columns but the last, padding zero.
        origin: the first column.
        ends: up to which column each row is loaded.
        tiers: for each row its loaded tokens by the tier that served them.
    """

    layers: Layers = field(repr=False)
    origin: int
    ends: tuple[int, ...]
    tiers: tuple[Mapping[str, int], ...]


def load(space: Space, prompts: Prompts, chains: Sequence[Chain], *, held: int = 0, wait: float = 0.0) -> Loaded | None:
    """Load the longest stored prefix of each prompt, all but its last token at most.

    Args:
        space: where they are.
        prompts: what is wanted.
        chains: their keys.
        held: tokens that a single prompt's cache has already.
        wait: seconds to wait for blocks that must first be brought up from another tier.

    Returns:
        None when nothing was found beyond what is held.
    """
    spec, step = space.keyspace.spec, space.block_tokens
    origin = held // step * step
    within = [chain.upto(chain.tokens - 1, step) for chain in chains]
    if all(len(chain.addresses) * step <= held for chain in within):
        return None
    with ExitStack() as leased:
        hits = [leased.enter_context(space.match(chain, wait=wait)) for chain in within]
        found = [pad + hit.tokens for pad, hit in zip(prompts.pads, hits, strict=True) if hit.tokens > held]
        if not found:
            return None
        new = torch.empty if len(hits) == 1 else torch.zeros
        columns = max(found) if len(hits) == 1 else prompts.columns - 1
        shape, dtype = (len(hits), spec.kv_heads, columns - origin), getattr(torch, spec.dtype)
        layers: Layers = [[new(*shape, dim, dtype=dtype) for dim in spec.head_dims] for _ in range(spec.layers)]
        ends, tiers = [], []
        for row, (pad, hit) in enumerate(zip(prompts.pads, hits, strict=True)):
            end = 0
            if hit.tokens > held:
                room = slice(pad, pad + hit.tokens - origin)
                hit.load([[part[row, :, room].transpose(0, 1) for part in layer] for layer in layers], origin=origin)
                end = hit.verified
            ends.append(pad + end)
            tiers.append(hit.tiers if end > held else {})
    return Loaded(layers, origin, tuple(ends), tuple(tiers)) if max(ends) > held else None


def meeting(ends: Sequence[int], columns: int) -> int:
    """Up to which column rows are computed one by one, before the rest is computed together.

    A row that is loaded less far than others would make all of them compute what they have. So it is computed alone up
    to where they meet: at one of the rows' ends, or right before the last column, whichever costs least.

    Args:
        ends: up to which column each row is loaded.
        columns: of the longest prompt.
    """

    def cost(column: int) -> int:
        alone = sum(CALL + column - end for end in ends if end < column)
        return alone + len(ends) * (columns - column)

    return min(sorted({min(end, columns - 1) for end in (*ends, columns - 1)}), key=cost)


def put(model: Any, layers: Sequence[Any], found: Loaded, prompts: Prompts) -> int:
    """Put what was loaded into a cache's layers; up to which column all rows are there.

    Rows that are behind are computed up to where they meet the others.
    """
    end = meeting(found.ends, prompts.columns)
    for row, reached in enumerate(found.ends):
        if prompts.pads[row] <= reached < end:
            _compute(model, found, prompts, row, end)
    for layer, parts in zip(layers, found.layers, strict=True):
        keys, values = (part[:, :, : end - found.origin].to(model.device) for part in parts)
        if found.origin:
            keys = torch.cat([layer.keys[:, :, : found.origin], keys], 2)
            values = torch.cat([layer.values[:, :, : found.origin], values], 2)
        _hold(layer, keys, values)
    return end


@torch.no_grad()
def _compute(model: Any, found: Loaded, prompts: Prompts, row: int, end: int) -> None:
    """Compute one row alone, up to a column, into what was loaded."""
    pad, reached = prompts.pads[row], found.ends[row]
    cache: Any = DynamicCache(config=model.config)
    if reached > pad:
        for layer, parts in zip(cache.layers, found.layers, strict=True):
            _hold(layer, *(part[row : row + 1, :, pad:reached].to(model.device) for part in parts))
    ids = prompts.ids[row : row + 1, reached:end].to(model.device)
    keep = {"logits_to_keep": 1} if "logits_to_keep" in forward_parameters(model) else {}
    model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **keep)
    for layer, parts in zip(cache.layers, found.layers, strict=True):
        for part, computed in zip(parts, (layer.keys, layer.values), strict=True):
            part[row, :, reached:end] = computed[0, :, reached - pad :]


def _hold(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
