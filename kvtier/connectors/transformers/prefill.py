"""The KV of a whole prompt."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.client.save import Saved
from kvtier.client.space import Space
from kvtier.connectors.transformers.prefix import Prefix, cache_argument, forward_parameters, load_prefix


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

    cache: DynamicCache
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
    prefix = load_prefix(model, input_ids, space, wait=wait, attention_mask=attention_mask)
    options: dict[str, Any] = {cache_argument(model): prefix.cache, "use_cache": True}
    if "logits_to_keep" in forward_parameters(model):
        options["logits_to_keep"] = 1
    began = time.perf_counter()
    out = model(input_ids=prefix.ids[:, prefix.loaded :], **options)
    logits = out.logits[0, -1]
    report(prefix, began, logits)
    return Prefilled(
        prefix.cache,
        logits,
        prefix.loaded,
        prefix.ids.shape[1] - prefix.loaded,
        prefix.tiers,
        prefix.save() if save else None,
    )


def report(prefix: Prefix, began: float, logits: torch.Tensor) -> None:
    """Tell the space how long the rest of a prompt took, now that its first logits are there.

    Args:
        prefix: what was loaded of the prompt.
        began: when the model was called, on `time.perf_counter`.
        logits: of the prompt's last token; the next token needs them at once, so they may as well be waited for.
    """
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    prefix.space.computed(prefix.ids.shape[1] - prefix.loaded, time.perf_counter() - began)
