"""Pruning in models of transformers: the queries of a running model, and the KV of its cache.

Nothing here knows an architecture: a model's attention is called through transformers' attention interface, which
hands over the queries and all keys of a layer, rotated, whatever is done to them before.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvtier.errors import UnsupportedKV, UsageError
from kvtier.pruning.pruner import Pruner

MASKED = ("eager", "sdpa")
"""Attention of transformers that takes a mask for each layer."""
_numbers = itertools.count()


@contextmanager
def watched(model: Any, pruner: Pruner) -> Iterator[None]:
    """While open, the model tells the pruner what its queries look at, and masks follow what each layer holds.

    For one sequence without padding, with a `DynamicCache`. Give `position_ids` that begin at `pruner.next_position`:
    once tokens were dropped, the cache no longer says where the next one stands. Masks are made for each layer, so that
    layers and heads may hold different numbers of tokens, and calls may have several tokens.
    The model's attention has another name meanwhile, so that a keyspace that was made for it does not fit: load first.

    Raises:
        UnsupportedKV: the model's attention is neither eager nor SDPA.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    config = model.config.get_text_config(decoder=True)
    kind = config._attn_implementation  # noqa: SLF001 its public name only sets it
    if kind not in MASKED:
        raise UnsupportedKV(f"the model's attention is {kind!r}; load it with attn_implementation='sdpa' or 'eager'")
    name = f"kvtier_pruning_{next(_numbers)}"
    AttentionInterface.register(name, _attention(kind, pruner))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[kind])
    config._attn_implementation = name  # noqa: SLF001
    try:
        yield
    finally:
        config._attn_implementation = kind  # noqa: SLF001
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name)  # noqa: SLF001 there is no public way to take a name back


def prune(cache: Any, pruner: Pruner) -> None:
    """Drop from a `DynamicCache` of one sequence what the pruner's policy drops."""
    parts = []
    for layer in cache.layers:
        if not layer.is_initialized or layer.keys.shape[0] != 1:
            raise UsageError("a pruner is for one sequence: give a cache that holds one, and its prompt computed")
        parts.append((layer.keys[0], layer.values[0]))
    for layer, (keys, values) in zip(cache.layers, pruner.prune(parts), strict=True):
        layer.keys, layer.values = keys[None], values[None]


def _attention(kind: str, pruner: Pruner) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **rest: Any,
    ) -> Any:
        if query.shape[0] != 1:
            raise UsageError(f"a pruner is for one sequence, and the model was given {query.shape[0]}")
        # Eager attention is each architecture's own, and not in the interface.
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        inner = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager)
        pruner.observe(module.layer_idx, query[0], key[0], scale=rest.get("scaling"))
        held = pruner.positions(module.layer_idx) >= 0 if pruner.ragged(module.layer_idx) else None
        mask = _mask(held, query, key.shape[2], attention_mask, kind)
        return inner(module, query, key, value, mask, **rest)

    return attend


def _mask(
    held: torch.Tensor | None, query: torch.Tensor, tokens: int, given: torch.Tensor | None, kind: str
) -> torch.Tensor | None:
    """The mask of one layer; the model's own, made for its first layer, where that one fits.

    Args:
        held: where there is a token, `[kv_heads, tokens]`; None for everywhere.
        query: `[1, heads, queries, head_dim]`.
        tokens: that the layer holds.
        given: the model's own.
        kind: of attention: SDPA takes booleans, eager what is added to the logits.
    """
    new = query.shape[2]
    if held is None and (new in (1, tokens) if given is None else given.shape[-1] == tokens):
        return given
    if held is None and new == 1:
        return None
    sees = torch.ones(1, new, tokens, dtype=torch.bool, device=query.device).tril_(tokens - new)
    if held is not None:
        sees = sees & held.repeat_interleave(query.shape[1] // len(held), 0)[:, None]
    if kind == "sdpa":
        return sees[None]
    hidden = torch.zeros(sees.shape, dtype=query.dtype, device=query.device)
    return hidden.masked_fill_(~sees, torch.finfo(query.dtype).min)[None]
