"""One text as the model reads it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.quality.pruned import Left, evidence, witness
from benchmarks.quality.stored import KV
from benchmarks.quality.texts import Text
from benchmarks.quality.unusable import Unusable
from kvtier.connectors.transformers.forward import cache_argument, forward_parameters
from kvtier.pruning import Evidence, watched


@dataclass(frozen=True)
class Passage:
    """A context, what follows it, and what the model says of that.

    Attributes:
        text: what is read.
        ids: token ids of what follows the context, one more than are scored: each is predicted from the one before.
        kv: of the context, in bfloat16 as an engine keeps it.
        exact: log-probabilities of every next token over that KV, `[tokens, vocabulary]`.
        probabilities: these, once and for all strategies.
        certainty: what these expect of themselves, `[tokens]`: minus their entropy.
        evidence: of every layer, what pruning looks at: attention among the context's own tokens; empty unless asked
            for.
    """

    text: Text
    ids: torch.Tensor
    kv: KV
    exact: torch.Tensor
    probabilities: torch.Tensor
    certainty: torch.Tensor
    evidence: Sequence[Evidence] = ()


@torch.no_grad()
def read(model: Any, tokenizer: Any, text: Text, context: int, tokens: int, *, window: int = 0) -> Passage:
    """Compute the KV of the first tokens of a text and score what follows.

    Args:
        model: what reads.
        tokenizer: the model's.
        text: what is read.
        context: tokens whose KV is kept.
        tokens: scored after them.
        window: of how many last tokens of the context the queries are wanted; 0: nothing will be pruned.

    Raises:
        Unusable: the text is too short.
        UnsupportedKV: there is a window, and the model's attention cannot be watched.
    """
    ids = tokenizer(text.read(), return_tensors="pt").input_ids[0]
    wanted = context + tokens + 1
    if len(ids) < wanted:
        raise Unusable(f"{text.name} has {len(ids)} tokens in this tokenizer, of {wanted} wanted: lower --context")
    cache: Any = DynamicCache(config=model.config)
    options: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in forward_parameters(model):
        options["logits_to_keep"] = 1
    pruner = witness(model.config.get_text_config(decoder=True).num_hidden_layers, window) if window else None
    with watched(model, pruner) if pruner else nullcontext():
        model(input_ids=ids[None, :context], **options)
    kv = [(_tokens_first(layer.keys), _tokens_first(layer.values)) for layer in cache.layers]
    following = ids[context:wanted]
    seen = evidence(pruner, cache) if pruner else ()
    exact = go_on(model, following, kv)
    probabilities = exact.exp()
    return Passage(text, following, kv, exact, probabilities, expected(probabilities, exact), seen)


@torch.no_grad()
def go_on(model: Any, ids: torch.Tensor, kv: KV, left: Left | None = None) -> torch.Tensor:
    """Log-probabilities of what comes after each token but the last, over the KV of what was before the first.

    Args:
        model: what reads.
        ids: token ids.
        kv: `[tokens, kv_heads, head_dim]`.
        left: what is left of the context, when it lost tokens: `kv` holds these.
    """
    cache: Any = DynamicCache(config=model.config)
    for layer, parts in zip(cache.layers, kv, strict=True):
        keys, values = (part.to(model.dtype).transpose(0, 1)[None] for part in parts)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    options: dict[str, Any] = {cache_argument(model): cache}
    if left:
        options["position_ids"] = torch.arange(left.begin, left.begin + len(ids) - 1)[None]
    with watched(model, left.pruner) if left else nullcontext():
        logits = model(input_ids=ids[None, :-1], **options).logits[0]
    return logits.double().log_softmax(-1)


def expected(probabilities: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
    """Mean of some log-probabilities by the probabilities, of each token: one pass over either."""
    return torch.einsum("tv,tv->t", probabilities, logs)


def _tokens_first(part: torch.Tensor) -> torch.Tensor:
    return part[0].transpose(0, 1).to(torch.bfloat16).contiguous()
