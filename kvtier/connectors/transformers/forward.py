"""What a model's forward is called with, and who hears of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

CACHE_NAMES = ("cache", "past_key_values")
"""What models call their cache: since transformers 5.20, and before."""
PLAIN = frozenset(
    (
        *CACHE_NAMES,
        "attention_mask",
        "cache_position",
        "input_ids",
        "labels",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)
"""Arguments that leave the KV to the tokens, their places and the mask."""
_watched: WeakSet[Any] = WeakSet()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a forward.

    Attributes:
        ids: the tokens that it computes, `[rows, tokens]`; None when it was given none.
        mask: the attention mask; None for none.
        positions: the tokens' positions; None when the model counts them itself.
        other: an argument that may change the KV besides these; empty for none.
    """

    ids: torch.Tensor | None
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    other: str

    @classmethod
    def of(cls, model: Any, given: Mapping[str, Any]) -> Call:
        """What the arguments of one call say."""
        other = next((name for name, value in given.items() if name not in PLAIN and value is not None), "")
        if model.training:
            other = "training"
        elif torch.is_autocast_enabled(model.device.type):
            other = "autocast"
        return cls(given.get("input_ids"), given.get("attention_mask"), given.get("position_ids"), other)


def watch(model: Any) -> None:
    """From now on tell caches that want to know of it what this model computes into them.

    A cache wants to know when it has `before_forward(call)`, called before anything runs, and `after_forward()`, called
    when the model has its result; both on the thread that runs the model.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if inner not in _watched:
        _watched.add(inner)
        inner.register_forward_pre_hook(_before, with_kwargs=True)
        inner.register_forward_hook(_after, with_kwargs=True)


def forward_parameters(model: Any) -> frozenset[str]:
    """Names of what a model's `forward` takes."""
    return frozenset(inspect.signature(model.forward).parameters)


def cache_argument(model: Any) -> str:
    """What a model calls its cache: `cache`, or `past_key_values` before transformers 5.20."""
    return next(name for name in CACHE_NAMES if name in forward_parameters(model) or name == CACHE_NAMES[-1])


def _before(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = _named(model, args, kwargs)
    if hasattr(cache := _cache(given), "before_forward"):
        cache.before_forward(Call.of(model, given))


def _after(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    if hasattr(cache := _cache(_named(model, args, kwargs)), "after_forward"):
        cache.after_forward()


def _named(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    return dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs


def _cache(given: Mapping[str, Any]) -> Any:
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
