"""`model.generate` on top of a loaded prefix."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from kvtier.client.save import Saved
from kvtier.client.space import Space
from kvtier.connectors.transformers.cache import KVTierCache
from kvtier.connectors.transformers.prompts import one_sequence
from kvtier.errors import UsageError

HARMLESS = frozenset(
    (
        "generation_config",
        "logits_processor",
        "prefix_allowed_tokens_fn",
        "stop_strings",
        "stopping_criteria",
        "streamer",
        "tokenizer",
    )
)
"""Arguments of `model.generate`, besides the fields of a GenerationConfig, that do not change a token's KV."""
REFUSED = frozenset(
    (
        "assistant_early_exit",
        "cache_config",
        "cache_implementation",
        "prompt_lookup_num_tokens",
        "token_healing",
        "use_mtp",
    )
)
"""Fields of a GenerationConfig that choose another cache, or put into it what is not of the sequence."""


@dataclass(frozen=True)
class Generated:
    """A sequence and where its KV came from.

    Attributes:
        sequence: token ids of prompt and answer, `[tokens]`.
        tokens: those of the answer.
        cache: KV of all but the last token.
        loaded: tokens of the prompt that came from kvtier.
        computed: tokens of the prompt that the model computed.
        tiers: loaded tokens by the tier that served them.
        saved: what became of the blocks of prompt and answer; None when none was to be saved.
    """

    sequence: torch.Tensor
    tokens: torch.Tensor
    cache: KVTierCache
    loaded: int
    computed: int
    tiers: Mapping[str, int]
    saved: Future[Saved] | None


def generate(
    model: Any,
    input_ids: Any,
    space: Space,
    *,
    wait: float = 0.0,
    attention_mask: Any = None,
    save: bool = True,
    **kwargs: Any,
) -> Generated:
    """Generate as `model.generate` does, with the longest stored prefix of the prompt loaded instead of computed.

    What is computed is saved in the background, each block as soon as it is whole: the next turn of a conversation
    finds it. A `KVTierCache` does the same for conversations and batches.

    Args:
        model: as for `prefill`.
        input_ids: as for `prefill`.
        space: as for `prefill`.
        wait: as for `prefill`.
        attention_mask: as for `prefill`.
        save: whether to save what was computed.
        **kwargs: for `model.generate`: a `generation_config` or its fields, a streamer, processors, criteria.

    Raises:
        UnsupportedKV: the model's KV cannot be stored.
        UsageError: as for `prefill`; or an argument that would change the KV or make several sequences.
    """
    _check(model, kwargs)
    cache = KVTierCache(model, space, wait=wait, save=save)
    turn = cache.turn(one_sequence(input_ids, attention_mask))
    (start,) = cache.starts
    sequence = model.generate(**turn, **kwargs | {"return_dict_in_generate": False})[0]
    return Generated(
        sequence,
        sequence[start.tokens :],
        cache,
        start.loaded,
        start.computed,
        start.tiers,
        cache.saved() if save else None,
    )


def _check(model: Any, kwargs: Mapping[str, Any]) -> None:
    known = GenerationConfig()  # type: ignore[no-untyped-call]
    for name in kwargs:
        if not (name in HARMLESS or hasattr(known, name)):
            raise UsageError(f"generate() takes no {name!r}: it would change the KV or its cache; leave it out")
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None) or known
    if kwargs.get("use_cache", getattr(config, "use_cache", None)) is False:
        raise UsageError("use_cache is off, and a prefix is loaded into a cache; set it to True")
    for name in REFUSED:
        if kwargs.get(name, getattr(config, name, None)):
            raise UsageError(f"generate() takes no {name!r}: it would change the KV or its cache; leave it out")
    for name in ("num_beams", "num_return_sequences"):
        if (kwargs.get(name, getattr(config, name, None)) or 1) > 1:
            raise UsageError(f"{name} is more than 1; kvtier generates one sequence a call")
