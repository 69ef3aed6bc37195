"""`model.generate` on top of a loaded prefix."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList

from kvtier.client.save import Saved
from kvtier.client.space import Space
from kvtier.connectors.transformers.prefill import report
from kvtier.connectors.transformers.prefix import cache_argument, load_prefix
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
        saved: what became of the last save, which holds prompt and answer; None when none was asked for.
    """

    sequence: torch.Tensor
    tokens: torch.Tensor
    cache: DynamicCache
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

    The prompt is saved as soon as it is computed, the answer when it is complete, both in the background: the next turn
    of a conversation finds them.

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
    prefix = load_prefix(model, input_ids, space, wait=wait, attention_mask=attention_mask)
    began = time.perf_counter()

    def prefilled(logits: torch.Tensor) -> None:
        report(prefix, began, logits)
        if save:
            prefix.save()

    asked = kwargs.pop("logits_processor", None) or []
    kwargs["logits_processor"] = LogitsProcessorList([*asked, _WhenPrefilled(prefilled)])
    sequence = model.generate(
        prefix.ids,
        attention_mask=torch.ones_like(prefix.ids),
        **{cache_argument(model): prefix.cache},
        **kwargs | {"return_dict_in_generate": False},
    )[0]
    prompt = prefix.ids.shape[1]
    # The last token was chosen, not computed; a cache that holds anything else is not saved.
    held = sequence[: len(sequence) - 1]
    return Generated(
        sequence,
        sequence[prompt:],
        prefix.cache,
        prefix.loaded,
        prompt - prefix.loaded,
        prefix.tiers,
        prefix.save(held) if save else None,
    )


class _WhenPrefilled(LogitsProcessor):
    """Calls once with the first logits: then the cache holds the whole prompt."""

    def __init__(self, call: Callable[[torch.Tensor], object]) -> None:
        self._call: Callable[[torch.Tensor], object] | None = call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        call, self._call = self._call, None
        if call is not None:
            call(scores)
        return scores


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
