"""One text as the model reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.quality.stored import KV
from benchmarks.quality.texts import Text
from benchmarks.quality.unusable import Unusable
from kvtier.connectors.transformers.forward import cache_argument, forward_parameters


@dataclass(frozen=True)
class Passage:
    """A context, what follows it, and what the model says of that.

    Attributes:
        text: what is read.
        ids: token ids of what follows the context, one more than are scored: each is predicted from the one before.
        kv: of the context, in bfloat16 as an engine keeps it.
        exact: log-probabilities of every next token over that KV, `[tokens, vocabulary]`.
    """

    text: Text
    ids: torch.Tensor
    kv: KV
    exact: torch.Tensor


@torch.no_grad()
def read(model: Any, tokenizer: Any, text: Text, context: int, tokens: int) -> Passage:
    """Compute the KV of the first tokens of a text and score what follows.

    Raises:
        Unusable: the text is too short.
    """
    ids = tokenizer(text.read(), return_tensors="pt").input_ids[0]
    wanted = context + tokens + 1
    if len(ids) < wanted:
        raise Unusable(f"{text.name} has {len(ids)} tokens in this tokenizer, of {wanted} wanted: lower --context")
    cache: Any = DynamicCache(config=model.config)
    options: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in forward_parameters(model):
        options["logits_to_keep"] = 1
    model(input_ids=ids[None, :context], **options)
    kv = [(_tokens_first(layer.keys), _tokens_first(layer.values)) for layer in cache.layers]
    following = ids[context:wanted]
    return Passage(text, following, kv, go_on(model, following, kv))


@torch.no_grad()
def go_on(model: Any, ids: torch.Tensor, kv: KV) -> torch.Tensor:
    """Log-probabilities of what comes after each token but the last, over the KV of what was before the first."""
    cache: Any = DynamicCache(config=model.config)
    for layer, parts in zip(cache.layers, kv, strict=True):
        keys, values = (part.to(model.dtype).transpose(0, 1)[None] for part in parts)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    logits = model(input_ids=ids[None, :-1], **{cache_argument(model): cache}).logits[0]
    return logits.double().log_softmax(-1)


def _tokens_first(part: torch.Tensor) -> torch.Tensor:
    return part[0].transpose(0, 1).to(torch.bfloat16).contiguous()
