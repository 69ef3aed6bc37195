"""Pruning policies by text: the presets of `kvtier.pruning`, and others that papers compare with.

    snap_kv(keep=0.5) | layers(0-5/16:snap_kv(keep=0.6);5/16-11/16:snap_kv(keep=0.8))

Layers that no range names lose nothing. Short sequences are pruned, too, unless `whole` says otherwise.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from kvtier.errors import ConfigError
from kvtier.pruning import (
    ByHead,
    KeyNorm,
    Mass,
    Policy,
    Window,
    attention_threshold,
    h2o,
    pyramid_kv,
    snap_kv,
    streaming_llm,
)
from kvtier.pruning.presets import budget


def key_norm(keep: float, **rest: Any) -> Policy:
    """The shortest keys stay (arXiv 2406.11430)."""
    return Policy(KeyNorm(), budget(keep), **rest)


def ada_kv(keep: float, **rest: Any) -> Policy:
    """SnapKV whose KV heads share what a layer has (arXiv 2407.11550)."""
    return Policy(Window(), ByHead(budget(keep)), **{"sinks": 0} | rest)


def mean_mass(keep: float, **rest: Any) -> Policy:
    """H2O, but for the mean of the weights in place of their sum."""
    return Policy(Mass(mean=True), budget(keep), **{"sinks": 0, "recent": 0, "recent_share": 0.5} | rest)


PRESETS: dict[str, Callable[..., Policy]] = {
    preset.__name__: preset
    for preset in (
        h2o,
        mean_mass,
        snap_kv,
        ada_kv,
        pyramid_kv,
        streaming_llm,
        key_norm,
        attention_threshold,
    )
}
_LAYERS = re.compile(r"layers\((.*)\)", re.DOTALL)
_RANGE = re.compile(r"\s*(\d+(?:/\d+)?)-(\d+(?:/\d+)?)\s*:(.*)", re.DOTALL)


def policies(text: str, layers: int) -> list[Policy | None]:
    """The policy of each layer; None where all tokens stay.

    Raises:
        ConfigError: what is wrong with the text, and what to write.
    """
    whole = _LAYERS.fullmatch(text.strip())
    if not whole:
        return [policy(text)] * layers
    by_layer: list[Policy | None] = [None] * layers
    for part in whole.group(1).split(";"):
        first, stop, its = _range(part)
        for layer in range(*(math.floor(edge * layers + Fraction(1, 2)) for edge in (first, stop))):
            if by_layer[layer] is not None:
                raise ConfigError(f"{text!r}: layer {layer} has two policies")
            by_layer[layer] = its
    return by_layer


def policy(text: str) -> Policy:
    """The policy that a preset makes.

    Raises:
        ConfigError: no such preset, or options that it does not take.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ConfigError(f"{text!r} is no pruning; write a preset and its options, as in snap_kv(keep=0.5)")
        options = {str(option.arg): ast.literal_eval(option.value) for option in call.keywords}
    except (SyntaxError, ValueError) as exc:
        raise ConfigError(f"{text!r} cannot be read ({exc}); write numbers by name, as in snap_kv(keep=0.5)") from exc
    name = call.func.id
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1, 0)[0]
        raise ConfigError(f"no preset {name!r}; did you mean {near!r}? Presets: {', '.join(PRESETS)}")
    try:
        return PRESETS[name](**{"whole": 0} | options)
    except TypeError as exc:
        raise ConfigError(f"{text!r}: {exc}; docs/pruning.md has what each preset takes") from exc


def _range(part: str) -> tuple[Fraction, Fraction, Policy]:
    found = _RANGE.fullmatch(part)
    if not found:
        raise ConfigError(f"{part!r} is no range of layers and its preset; write 0-5/16:snap_kv(keep=0.6)")
    try:
        first, stop = Fraction(found.group(1)), Fraction(found.group(2))
    except ZeroDivisionError as exc:
        raise ConfigError(f"{part!r}: a fraction of the layers is no n/0") from exc
    if not 0 <= first < stop <= 1:
        raise ConfigError(f"{part!r}: {first}-{stop} are no fractions of the layers, from 0 to 1")
    return first, stop, policy(found.group(3))
