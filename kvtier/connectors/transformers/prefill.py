"""The KV of a whole prompt."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.client.save import Saved
from kvtier.client.space import Space
from kvtier.connectors.transformers.cache import KVTierCache
from kvtier.connectors.transformers.forward import cache_argument, forward_parameters
from kvtier.connectors.transformers.prompts import one_sequence


@dataclass(frozen=True)
class Prefilled:
    """A prompt's KV.

    Attributes:
        cache: holds all of it; pass it to the model with the next token.
        logits: of the last token, `[vocabulary]`.
        loaded: tokens that came from kvtier.
        computed: tokens that the model computed.
        tiers: loaded tokens by the tier that served them.
        saved: what became of the save; None when none was asked for.
    """

    cache: KVTierCache
    logits: torch.Tensor
    loaded: int
    computed: int
    tiers: Mapping[str, int]
    saved: Future[Saved] | None


@torch.no_grad()
def prefill(
    model: Any,
    input_ids: Any,
    space: Space,
    *,
    wait: float = 0.0,
    attention_mask: Any = None,
    save: bool = True,
) -> Prefilled:
    """Load the longest stored prefix of a prompt, compute the rest, and save that in the background.

    Args:
        model: a decoder-only model for causal language modelling, in `eval` mode.
        input_ids: one sequence, `[1, tokens]` or `[tokens]`.
        space: where its KV is kept; see `space_for`.
        wait: seconds to wait for blocks that must first be brought up from another tier.
        attention_mask: may be given, and must be all ones.
        save: whether to save what was computed.

    Raises:
        UnsupportedKV: the model's KV cannot be stored.
        UsageError: not one sequence, a mask with zeros, or a space made for another model.
    """
    cache = KVTierCache(model, space, wait=wait, save=save)
    turn = cache.turn(one_sequence(input_ids, attention_mask))
    (start,) = cache.starts
    options: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in forward_parameters(model):
        options["logits_to_keep"] = 1
    out = model(input_ids=turn["input_ids"][:, start.loaded :], **options)
    saved = cache.saved() if save else None
    return Prefilled(cache, out.logits[0, -1], start.loaded, start.computed, start.tiers, saved)
