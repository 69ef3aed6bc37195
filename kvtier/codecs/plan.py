"""Which precision for which layer, for K or V, for how old a token.

    plan   := NAME | scheme | K=scheme,V=scheme | sinks:N(plan) | layers(RANGE:plan;RANGE:plan...) | recent:N(plan)
    RANGE  := 0-9 (layers, both inclusive) | 7 | 0-5/16 (fractions of the layers, from and to)

Text in this form is what `kvtier.toml` and `Cache.keyspace` take. Resolved for a spec it becomes the canonical text,
which keys and block headers carry: names are spelt out, fractions are layers, and what a block cannot hold is
replaced.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import TypeAlias

from kvtier.codecs.ranges import bounds, range_text, ranged, split
from kvtier.codecs.scheme import CHANNEL_TOKENS, Scheme
from kvtier.errors import ConfigError
from kvtier.spec import KVSpec

_INT4 = "K=int4/channel:64/asym,V=int4/token/asym"
_INT8 = "K=int8/channel:64/asym,V=int8/token/asym"
NAMED = {
    "raw": "raw",
    "int8": _INT8,
    "k8v4": "sinks:1(K=int8/channel:64/asym,V=int4/token/sym/hadamard/lloyd)",
    "int4": f"sinks:1({_INT4})",
    "int3": "sinks:1(K=int4/channel:64/asym,V=int2/token/sym/hadamard/lloyd)",
    "fp8": "K=e4m3/channel:64/asym,V=e4m3/token/sym",
    "layered": f"layers(0-5/16:sinks:1({_INT4});5/16-11/16:{_INT8};11/16-1:raw)",
    "mixed": f"recent:128(sinks:1({_INT4}))",
}
"""Names for people. `docs/quality.md` has what each costs. K is per channel in all of them: per token, at any few
bits, it breaks on models whose K has large constant channels."""

SMALL_BLOCKS = Scheme.parse("int8/token/sym")
"""What stands in for a scheme per channel where a block has fewer tokens than share a scale, and fewer than 64: there
the scales would weigh too much. Who wants them all the same asks for as many tokens as blocks have: `channel:16`."""
KINDS = (*(name for name in NAMED if name != "mixed"), "other")
"""What `kind_of` says of plans of blocks."""
RAW = Scheme("raw")
LONGEST = 1 << 16
"""Characters that are looked at; canonical texts of more than 3,952 fit no block header."""
DEPTH = 3
"""Brackets in one another that a plan may have."""

_NAMES = {text: name for name, text in NAMED.items()} | {
    re.sub(r"K=[^,]*channel[^,]*", f"K={SMALL_BLOCKS}", text): name for name, text in NAMED.items()
}


@dataclass(frozen=True, slots=True)
class Uniform:
    """The same for every layer and token. An MLA latent is stored as `key` says."""

    key: Scheme
    value: Scheme

    def __str__(self) -> str:
        return str(self.key) if self.key == self.value else f"K={self.key},V={self.value}"


@dataclass(frozen=True, slots=True)
class Sinks:
    """The first `tokens` tokens of a sequence as they are, the others by `plan`; they are in its first block only."""

    tokens: int
    plan: Plan

    def __str__(self) -> str:
        return f"sinks:{self.tokens}({self.plan})"


@dataclass(frozen=True, slots=True)
class ByLayer:
    """Another plan for each range of layers.

    Attributes:
        ranges: (first, after the last, plan): layers as integers, or fractions of all layers from 0 to 1.
    """

    ranges: tuple[tuple[int | Fraction, int | Fraction, Plan], ...]

    def __str__(self) -> str:
        return f"layers({';'.join(f'{range_text(first, stop)}:{plan}' for first, stop, plan in self.ranges)})"


@dataclass(frozen=True, slots=True)
class ByAge:
    """The `recent` youngest tokens as they are, all older ones by `old`.

    For private caches only, where a token ages while its exact value is still there; a shared block has no age.
    """

    recent: int
    old: Plan

    def __str__(self) -> str:
        return f"recent:{self.recent}({self.old})"


Plan: TypeAlias = Uniform | Sinks | ByLayer | ByAge


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer's parts are stored as, and how many first tokens of the sequence as they are."""

    schemes: tuple[Scheme, ...]
    sinks: int


def kind_of(canonical: str) -> str:
    """The name of the plan that this canonical text is of; "layered" for any by layer, "other" for what has no name."""
    if canonical.startswith("layers("):
        return "layered"
    return _NAMES.get(canonical, "other")


def parse_plan(text: str) -> Plan:
    """Read a plan: see the module.

    Raises:
        ConfigError: what is wrong with the text, and what to write.
    """
    text = _readable(text)
    if NAMED.get(text, text) != text:
        return parse_plan(NAMED[text])
    head, bracket, inner = text.partition("(")
    if bracket:
        if not inner.endswith(")"):
            raise ConfigError(f"{text!r} does not end with the bracket that it opens")
        return _nested(head.strip(), inner[:-1], text)
    if text.startswith("K="):
        key, comma, value = text[2:].partition(",")
        if not comma or not value.strip().startswith("V="):
            raise ConfigError(f"{text!r} says what K is and not V; write K=int4/channel:64/asym,V=int4/token/asym")
        return Uniform(Scheme.parse(key), Scheme.parse(value.strip()[2:]))
    try:
        scheme = Scheme.parse(text)
    except ConfigError as exc:
        if "/" in text:
            raise
        near = difflib.get_close_matches(text, NAMED, 1, 0)
        raise ConfigError(f"no plan {text!r}; did you mean {near[0]!r}? Plans: {', '.join(NAMED)}") from exc
    return Uniform(scheme, scheme)


def _readable(text: str) -> str:
    """The text without what surrounds it, if it is one, and not beyond all measure."""
    if not isinstance(text, str):
        raise ConfigError(f"the plan is a {type(text).__name__}; pass its name or text, such as 'int8'")
    text = text.strip()
    if len(text) > LONGEST:
        raise ConfigError(f"a plan text of {len(text):,} characters is too long; a block header has room for 3,976")
    if max(accumulate((letter == "(") - (letter == ")") for letter in text), default=0) > DEPTH:
        raise ConfigError(f"a plan has at most {DEPTH} brackets in one another, as in recent:N(sinks:N(layers(...)))")
    return text


def _nested(head: str, inner: str, text: str) -> Plan:
    name, _, number = head.partition(":")
    if head == "layers":
        return ByLayer(tuple(_layers(part, text) for part in split(inner)))
    if name not in ("sinks", "recent"):
        raise ConfigError(f"{text!r}: what has brackets is sinks:N(...), recent:N(...) or layers(...)")
    if not re.fullmatch(r"[1-9][0-9]{0,8}", number):
        raise ConfigError(
            f"{text!r}: {name} needs a number of tokens, as in {name}:{1 if name == 'sinks' else 128}(...)"
        )
    plan = parse_plan(inner)
    if _holds(plan, ByAge):
        raise ConfigError(f"{text!r}: recent:N(...) can only be outermost")
    if name == "recent":
        return ByAge(int(number), plan)
    if _holds(plan, Sinks):
        raise ConfigError(f"{text!r} says twice how many first tokens are exact")
    return Sinks(int(number), plan)


def _layers(part: str, text: str) -> tuple[int | Fraction, int | Fraction, Plan]:
    first, stop, inner = ranged(part, text)
    plan = parse_plan(inner)
    if _holds(plan, ByAge) or _holds(plan, ByLayer):
        raise ConfigError(f"{text!r}: a layer's plan can hold neither recent:N(...) nor layers(...)")
    return first, stop, plan


def _holds(plan: Plan, kind: type) -> bool:
    if isinstance(plan, kind):
        return True
    if isinstance(plan, ByLayer):
        return any(_holds(inner, kind) for _, _, inner in plan.ranges)
    return isinstance(plan, Sinks) and _holds(plan.plan, kind)


def resolve(plan: Plan, spec: KVSpec) -> tuple[LayerPlan, ...]:
    """Say for each layer of a spec what is stored.

    Raises:
        ConfigError: layers without a plan or with two, more exact tokens than a block has, or precision by age.
    """
    if isinstance(plan, ByAge):
        raise ConfigError(
            f"{plan}: precision by age is for a sequence's private cache; blocks are shared and have no age. "
            f"Use {plan.old}"
        )
    if isinstance(plan, Sinks):
        if plan.tokens >= spec.block_tokens:
            raise ConfigError(f"{plan}: the exact first tokens must be fewer than the {spec.block_tokens} of a block")
        return tuple(LayerPlan(layer.schemes, plan.tokens) for layer in resolve(plan.plan, spec))
    if isinstance(plan, Uniform):
        schemes = (plan.key,) if spec.mla else (plan.key, plan.value)
        fitting = tuple(_fitting(*each, spec) for each in zip(schemes, spec.head_dims, strict=True))
        return (LayerPlan(fitting, 0),) * spec.layers
    return _by_layer(plan, spec)


def _by_layer(plan: ByLayer, spec: KVSpec) -> tuple[LayerPlan, ...]:
    layers: list[LayerPlan | None] = [None] * spec.layers
    for first, stop, inner in plan.ranges:
        low, high = bounds(first, stop, spec.layers)
        for layer, what in enumerate(resolve(inner, spec)[low:high], low):
            if layers[layer] is not None:
                raise ConfigError(f"{plan}: layer {layer} has two plans")
            layers[layer] = what
        if high > spec.layers:
            raise ConfigError(f"{plan}: there is no layer {high - 1}; the spec has {spec.layers}")
    missing = [i for i, layer in enumerate(layers) if layer is None]
    if missing:
        raise ConfigError(f"{plan}: layer {missing[0]} has no plan; the ranges must cover all {spec.layers} layers")
    return tuple(layer for layer in layers if layer is not None)


def _fitting(scheme: Scheme, dim: int, spec: KVSpec) -> Scheme:
    if scheme.granularity == "channel" and scheme.group > spec.block_tokens:
        if spec.block_tokens < CHANNEL_TOKENS:
            return SMALL_BLOCKS
        scheme = replace(scheme, group=spec.block_tokens)
    if scheme.granularity == "group" and scheme.group >= dim:
        scheme = replace(scheme, granularity="token", group=0)
    if scheme.hadamard and dim % 2 and not scheme.lloyd:
        scheme = replace(scheme, hadamard=False)
    return RAW if (scheme.precision, spec.dtype) in (("bf16", "bfloat16"), ("fp16", "float16")) else scheme


def canonical(layers: tuple[LayerPlan, ...]) -> str:
    """The one text of what is stored: equal layers, equal text, however it was asked for."""
    runs: list[tuple[int, int, str]] = []
    for number, layer in enumerate(layers):
        text = str(Uniform(layer.schemes[0], layer.schemes[-1]))
        if layer.sinks and any(scheme.precision != "raw" for scheme in layer.schemes):
            text = f"sinks:{layer.sinks}({text})"
        first = runs.pop()[0] if runs and runs[-1][2] == text else number
        runs.append((first, number + 1, text))
    if len(runs) == 1:
        return runs[0][2]
    return f"layers({';'.join(f'{range_text(first, stop)}:{text}' for first, stop, text in runs)})"


def canonical_plan(text: str, spec: KVSpec) -> str:
    """Turn a plan's name or text into the canonical text for blocks of this spec.

    Raises:
        ConfigError: no such plan, or one that blocks of this spec cannot follow.
    """
    return canonical(resolve(parse_plan(text), spec))
