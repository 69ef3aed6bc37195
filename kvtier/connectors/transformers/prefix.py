"""The stored prefix of one prompt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.client.hit import Hit
from kvtier.client.save import Saved
from kvtier.client.scope import Chain
from kvtier.client.space import Space
from kvtier.connectors.transformers.storable import require
from kvtier.errors import KVMismatch, UsageError


@dataclass(frozen=True)
class Prefix:
    """A prompt and what was loaded of it.

    Attributes:
        ids: the prompt, `[1, tokens]`, on the model's device.
        cache: a DynamicCache that holds the loaded tokens.
        loaded: how many these are.
        tiers: the same by the tier that served them.
        space: where they came from.
        chain: the prompt's keys.
        hit: proves what `loaded` says.
    """

    ids: torch.Tensor
    cache: Any
    loaded: int
    tiers: Mapping[str, int]
    space: Space
    chain: Chain
    hit: Hit

    def save(self, token_ids: Any = None) -> Future[Saved]:
        """Save in the background what the cache holds of a sequence beyond what was loaded.

        Args:
            token_ids: the prompt and what follows it; the prompt alone unless given.
        """
        chain = self.chain if token_ids is None else self.space.chain(token_ids)
        if self.cache.get_seq_length() != chain.tokens:
            return self.space.refused("kv_mismatch")  # another cache was used, or more than this sequence is in it
        kv = [
            (_rows(layer.keys, chain.tokens, self.loaded), _rows(layer.values, chain.tokens, self.loaded))
            for layer in self.cache.layers
        ]
        try:
            return self.space.save(chain, kv, start=self.loaded, after=self.hit)
        except KVMismatch:  # the model did not compute what it said; its answer is good all the same
            return self.space.refused("kv_mismatch")


def load_prefix(model: Any, input_ids: Any, space: Space, *, wait: float, attention_mask: Any = None) -> Prefix:
    """Load the longest stored prefix of a prompt, all but its last token at most.

    Raises:
        UnsupportedKV: the model's KV cannot be stored.
        UsageError: more than one sequence, none, or a mask that hides tokens.
    """
    require(model, space)
    ids = _one_sequence(input_ids, attention_mask)
    chain = space.chain(ids[0])
    spec = space.keyspace.spec
    within = chain.upto(chain.tokens - 1, spec.block_tokens)
    cache: Any = DynamicCache(config=model.config)
    loaded, tiers = 0, {}
    with space.match(within, wait=wait) as hit:
        if hit.tokens:
            shape, dtype = (1, spec.kv_heads, hit.tokens), getattr(torch, spec.dtype)
            layers = [[torch.empty(*shape, dim, dtype=dtype) for dim in spec.head_dims] for _ in range(spec.layers)]
            loaded = hit.load([[part[0].transpose(0, 1) for part in layer] for layer in layers])
            tiers = hit.tiers
    if loaded:
        for layer, parts in zip(cache.layers, layers, strict=True):
            keys, values = (part[:, :, :loaded].to(model.device) for part in parts)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
    return Prefix(ids.to(model.device), cache, loaded, tiers if loaded else {}, space, chain, hit)


def forward_parameters(model: Any) -> frozenset[str]:
    """Names of what a model's `forward` takes."""
    return frozenset(inspect.signature(model.forward).parameters)


def cache_argument(model: Any) -> str:
    """What a model calls its cache: `cache`, or `past_key_values` before transformers 5.20."""
    return "cache" if "cache" in forward_parameters(model) else "past_key_values"


def _one_sequence(input_ids: Any, attention_mask: Any) -> torch.Tensor:
    ids = torch.as_tensor(input_ids)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise UsageError(f"input_ids has the shape {list(ids.shape)}; pass one sequence, [1, tokens], a call")
    if attention_mask is not None:
        mask = torch.as_tensor(attention_mask)
        if mask.numel() != ids.numel() or not bool((mask == 1).all()):
            raise UsageError(
                "attention_mask hides tokens or is not as long as input_ids: the KV of what is left would not be that "
                "of the tokens; pass the sequence without padding"
            )
    return ids


def _rows(part: torch.Tensor, tokens: int, start: int) -> torch.Tensor:
    """One part of a layer as `[tokens, kv_heads, head_dim]` in CPU memory, valid from token `start` on."""
    rows = part.detach()[0, :, :tokens].transpose(0, 1)
    if rows.device.type == "cpu":
        return rows
    host = torch.empty(rows.shape, dtype=rows.dtype)
    host[start:].copy_(rows[start:])
    return host
