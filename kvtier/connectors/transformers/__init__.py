"""kvtier for models of Hugging Face transformers, one sequence at a time.

    storable   which models can be stored; what must be part of the name of their keyspace
    prefix     the longest stored prefix of a prompt in a DynamicCache; saving what was computed beyond it
    prefill    prefill(): the KV of a whole prompt and the logits of its last token
    generate   generate(): model.generate() on top of a loaded prefix

>>> cache = kvtier.connect()
>>> space = space_for(cache, model, model_name="SmolLM2-135M-Instruct", revision="q4_1")
>>> result = generate(model, input_ids, space, max_new_tokens=64)
>>> result.tokens, result.loaded, result.computed

A prefix is decoded straight into the tensors of the cache's layers, `[1, kv_heads, tokens, head_dim]`, seen as
`[tokens, kv_heads, head_dim]` (a model on a GPU: through CPU memory). The last token is always computed, because its
logits are wanted. What was computed is saved in the background from views of the cache's own tensors: a DynamicCache
grows by concatenation into new ones, so generation goes on without touching what is being saved.

Whatever fails on kvtier's side, the model computes the prompt as it would without. What raises is a model whose KV
cannot be stored (`UnsupportedKV`, before anything runs) or a call that cannot be right (`UsageError`).
"""

from kvtier.connectors.transformers.generate import Generated, generate
from kvtier.connectors.transformers.prefill import Prefilled, prefill
from kvtier.connectors.transformers.storable import space_for, spec_for

__all__ = ["Generated", "Prefilled", "generate", "prefill", "space_for", "spec_for"]
