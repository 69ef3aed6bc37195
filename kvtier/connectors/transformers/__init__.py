"""kvtier for models of Hugging Face transformers.

    storable   which models can be stored; what must be part of the name of their keyspace
    adapters   which of PEFT's adapters are at work
    cache      KVTierCache: a conversation, or a batch of prompts, that is loaded and saved as it grows
    forward    what a model's forward is called with: caches hear of it
    record     from that: the tokens that the KV in a cache was computed from
    blocks     saving them as they become whole
    prompts    prompts padded on the left
    prefix     the longest stored prefixes of some prompts, put into a cache's layers
    generate   generate(): model.generate() of one sequence
    paged      PagedCache: a cache whose KV lies in pages; it stores nothing by itself
    prefill    prefill(): the KV of one prompt and the logits of its last token

>>> space = space_for(kvtier.connect(), model, model_name="SmolLM2-135M-Instruct", revision="q4_1")
>>> chat = KVTierCache(model, space)
>>> model.generate(**chat.turn(input_ids), max_new_tokens=64)

A prefix is decoded straight into the tensors of the cache's layers, `[rows, kv_heads, tokens, head_dim]`, seen as
`[tokens, kv_heads, head_dim]` (a model on a GPU: through CPU memory). The last token is always computed, because its
logits are wanted. What is saved are views of the cache's own tensors, or copies of a few tokens: a DynamicCache grows
by concatenation into new ones, so generation goes on without touching what is being saved.

Rows of a batch are loaded to different lengths, and a cache has one. Where they meet is chosen so that least is
computed: a row that is behind is computed alone up to there, without padding, what is loaded beyond is computed again.

Whatever fails on kvtier's side, the model computes the prompt as it would without. What raises is a model whose KV
cannot be stored (`UnsupportedKV`, before anything runs) or a call that cannot be right (`UsageError`).
"""

from kvtier.connectors.transformers.cache import KVTierCache, Start
from kvtier.connectors.transformers.generate import Generated, generate
from kvtier.connectors.transformers.paged import PagedCache, pages_for
from kvtier.connectors.transformers.prefill import Prefilled, prefill
from kvtier.connectors.transformers.storable import space_for, spec_for

__all__ = [
    "Generated",
    "KVTierCache",
    "PagedCache",
    "Prefilled",
    "Start",
    "generate",
    "pages_for",
    "prefill",
    "space_for",
    "spec_for",
]
