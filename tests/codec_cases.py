"""Specs, schemes, plans and KV of every kind, as hypothesis strategies; KV as engines hold it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from kvtier.codecs import reference
from kvtier.codecs.plan import parse_plan, resolve
from kvtier.codecs.registry import codec_for
from kvtier.codecs.scheme import EXACT, FLOATS, INTS
from kvtier.codecs.view import KVView
from kvtier.spec import KVSpec
from kvtier.testing.kv import Layers, Pages, at_line, random_kv, view_of

DIMS = st.sampled_from([1, 2, 7, 32, 33, 64, 80, 96, 128, 576, 1100])
WHOLE_LINES = st.sampled_from([32, 64, 96, 128, 576])
"""Of 16-bit elements: where heads are whole cache lines."""
DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])
SEEDS = st.integers(0, 2**32 - 1)
ELEMENTS = 12_000
"""Elements of a part at most: enough for what repeats to repeat, few enough for many examples."""


@st.composite
def specs(draw: Any, dtypes: Any = DTYPES, dims: Any = DIMS) -> KVSpec:
    dtype, layers, dim = draw(dtypes), draw(st.integers(1, 3)), draw(dims)
    if draw(st.integers(0, 4)) == 0:
        tokens = draw(st.integers(1, max(1, min(70, ELEMENTS // dim))))
        return KVSpec(layers, 1, dim, dtype, block_tokens=tokens, mla=True)
    v_dim = draw(st.one_of(st.just(dim), dims))
    heads = draw(st.integers(1, 4))
    tokens = draw(st.integers(1, max(1, min(70, ELEMENTS // (heads * max(dim, v_dim))))))
    return KVSpec(layers, heads, dim, dtype, v_head_dim=v_dim, block_tokens=tokens)


@st.composite
def schemes(draw: Any, tokens: int = 64, precisions: tuple[str, ...] = (*EXACT, *INTS, *FLOATS)) -> str:
    """Text of a scheme; `tokens`: how many a block has."""
    precision = draw(st.sampled_from(precisions))
    if precision in EXACT:
        return precision
    granularities = ["tensor", "token", f"group:{draw(st.sampled_from([2, 5, 32, 64, 100]))}"]
    if tokens > 1:
        granularities.append(f"channel:{draw(st.integers(2, tokens))}")
    words = [precision, draw(st.sampled_from(granularities)), draw(st.sampled_from(["sym", "asym"]))]
    if draw(st.booleans()):
        words.append("hadamard")
        if precision in INTS and precision != "int8" and words[1:3] == ["token", "sym"] and draw(st.booleans()):
            return "/".join([*words, "lloyd"])
    if precision in INTS and words[1] != "tensor" and draw(st.integers(0, 2)) == 0:
        words.append("clip")
    return "/".join(words)


@st.composite
def uniform(draw: Any, tokens: int = 64) -> str:
    key, value = draw(schemes(tokens)), draw(schemes(tokens))
    return draw(st.sampled_from([key, f"K={key},V={value}"]))


@st.composite
def in_layer(draw: Any, tokens: int = 64) -> str:
    """A plan that can stand for one layer."""
    plan = draw(uniform(tokens))
    sinks = draw(st.integers(0, min(tokens - 1, 9)))
    return f"sinks:{sinks}({plan})" if sinks else plan


@st.composite
def plans(draw: Any, spec: KVSpec) -> str:
    """A plan that blocks of a spec can follow."""
    tokens = spec.block_tokens
    kind = draw(st.sampled_from(["in layer", "in layer", "by layer", "outside"]))
    if kind == "in layer":
        return draw(in_layer(tokens))
    inner = in_layer(tokens) if kind == "by layer" else uniform(tokens)
    if draw(st.booleans()):
        text = f"layers(0-1/2:{draw(inner)};1/2-1:{draw(inner)})"
    else:
        text = f"layers({';'.join(f'{i}:{draw(inner)}' for i in range(spec.layers))})"
    sinks = draw(st.integers(0, tokens - 1)) if kind == "outside" else 0
    return f"sinks:{sinks}({text})" if sinks else text


class Arrays:
    """KV in arrays of some strides."""

    def __init__(self, spec: KVSpec, layers: Layers, layout: Any) -> None:
        self._spec, self._layers = spec, [[layout(part) for part in layer] for layer in layers]

    def view(self) -> KVView:
        return view_of(self._spec, self._layers)

    def contiguous(self) -> Layers:
        return [[np.ascontiguousarray(part) for part in layer] for layer in self._layers]


def dense(part: np.ndarray) -> np.ndarray:
    return part.copy()


def heads_first(part: np.ndarray) -> np.ndarray:
    """As transformers keeps it: `[1, heads, seq, dim]`, looked at as `[seq, heads, dim]`."""
    return part.transpose(1, 0, 2).copy().transpose(1, 0, 2)


def every_other_element(part: np.ndarray) -> np.ndarray:
    return np.repeat(part, 2, axis=2)[:, :, ::2]


def backwards(part: np.ndarray) -> np.ndarray:
    return part[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1]


def unaligned(part: np.ndarray) -> np.ndarray:
    return at_line(part, 6)


def aligned(part: np.ndarray) -> np.ndarray:
    """To cache lines: where whole ones can be written past the cache."""
    return at_line(part)


def aligned_heads_first(part: np.ndarray) -> np.ndarray:
    return at_line(part.transpose(1, 0, 2)).transpose(1, 0, 2)


def padded(part: np.ndarray) -> np.ndarray:
    """Tokens further apart than their heads are long."""
    room = np.zeros((part.shape[0], part.shape[1] + 2, part.shape[2]), part.dtype)
    room[:, 1:-1] = part
    return room[:, 1:-1]


ALIGNED = [aligned, aligned_heads_first, Pages]
LAYOUTS = [dense, heads_first, every_other_element, backwards, unaligned, padded, *ALIGNED]


def held(spec: KVSpec, layers: Layers, how: Any) -> Arrays | Pages:
    """A copy of KV, held in one of the `LAYOUTS`."""
    return Pages(spec, layers) if how is Pages else Arrays(spec, layers, how)


def hard_kv(spec: KVSpec, tokens: int, seed: int, top: float) -> Layers:
    """Rows and channels of magnitudes from denormal to `2**top`: all zero, constant, nearly so, with one outlier."""
    generator = np.random.default_rng(seed)
    layers = random_kv(spec, tokens, seed)
    for layer in layers:
        for i, part in enumerate(layer):
            values = np.clip(reference.to_float32(spec.dtype, part), -1, 1)
            shape = (*part.shape[:2], 1) if generator.integers(2) else (1, *part.shape[1:])
            bottom = -50 if generator.integers(2) else top - 3
            values = values * np.exp2(generator.uniform(bottom, top, shape)).astype(np.float32)
            if generator.integers(2):
                kind = generator.integers(0, 6, part.shape[:2])
                values[kind == 0] = 0
                values[kind == 1] = -0.0
                values[kind == 2] = values[kind == 2][:, :1]
                values[kind == 3] *= np.where(np.arange(part.shape[2]) == 0, 1, np.float32(1e-4))
                narrow = 1 + generator.random(values.shape) * np.exp2(generator.uniform(-23, -8, (*part.shape[:2], 1)))
                values[kind == 4] = (values[:, :, :1] * narrow).astype(np.float32)[kind == 4]
                values[:, :, generator.integers(0, 5, part.shape[2]) == 0] += np.float32(2.0 ** (top - 4))
            layer[i] = reference.from_float32(spec.dtype, values)
    return layers


class Case(NamedTuple):
    """One block among others.

    Attributes:
        layers: `[start + block_tokens + some, ...]`.
        start: where the block begins.
        how: one of `LAYOUTS`.
    """

    spec: KVSpec
    plan: str
    position: int
    layers: Layers
    start: int
    how: Any

    def block(self, layers: Layers) -> Layers:
        """The block's tokens."""
        stop = self.start + self.spec.block_tokens
        return [[part[self.start : stop] for part in layer] for layer in layers]

    @property
    def schemes(self) -> Any:
        """For each layer what it is stored as."""
        return resolve(parse_plan(self.plan), self.spec)


@st.composite
def cases(draw: Any, spec: KVSpec, plan: str, layouts: list[Any]) -> Case:
    seed, start, more = draw(SEEDS), draw(st.integers(0, 20)), draw(st.integers(0, 2))
    top = 15.9 if spec.dtype == "float16" else draw(st.sampled_from([15.9, 15.9, 15.9, 22.9, 127.9]))
    layers = hard_kv(spec, start + spec.block_tokens + more, seed, top)
    return Case(spec, plan, draw(st.sampled_from([0, 1, 9])), layers, start, draw(st.sampled_from(layouts)))


@st.composite
def any_cases(draw: Any) -> Case:
    spec = draw(specs())
    return draw(cases(spec, draw(plans(spec)), LAYOUTS))


@st.composite
def common_cases(draw: Any) -> Case:
    """What engines have and people choose: 16-bit KV in whole cache lines, the commonest codes, not rotated."""
    spec = draw(specs(st.sampled_from(["bfloat16", "float16"]), WHOLE_LINES))
    common = ("raw", "int8", "int4", "e4m3")
    key, value = (draw(schemes(spec.block_tokens, common)).replace("/hadamard", "") for _ in range(2))
    plan = f"K={key.replace('/lloyd', '')},V={value.replace('/lloyd', '')}"
    sinks = draw(st.integers(0, min(spec.block_tokens - 1, 5)))
    return draw(cases(spec, f"sinks:{sinks}({plan})" if sinks else plan, ALIGNED))


def body_of(spec: KVSpec, plan: str, layers: Layers, position: int = 0) -> bytes | None:
    """The body of a block that is all of these layers' tokens; None if it cannot be stored."""
    codec, zero = codec_for(plan, spec), np.array([0])
    memory = np.empty(codec.nbytes(position), np.uint8)
    stored = codec.encode(view_of(spec, layers), zero, memory, zero, np.array([position]), range(spec.layers))
    return memory.tobytes() if stored[0] else None


def layers_of(spec: KVSpec, plan: str, body: bytes, position: int = 0) -> Layers:
    """What a body holds."""
    codec, zero, out = codec_for(plan, spec), np.array([0]), random_kv(spec, spec.block_tokens)
    memory = np.frombuffer(body, np.uint8)
    codec.decode(memory, zero, np.array([position]), view_of(spec, out), zero, range(spec.layers))
    return out


def there_and_back(spec: KVSpec, plan: str, layers: Layers, position: int = 0) -> Layers:
    """What of a block is left after it was stored."""
    body = body_of(spec, plan, layers, position)
    assert body is not None, f"{plan} refuses the block"
    return layers_of(spec, plan, body, position)


def latent(values: Any, dtype: str = "float32") -> tuple[KVSpec, Layers]:
    """A spec of one layer and one head, and these values `[tokens, dim]` as its only part."""
    part = np.array(values, np.float32)[:, None, :]
    spec = KVSpec(1, 1, part.shape[2], dtype, block_tokens=len(part), mla=True)
    return spec, [[reference.from_float32(dtype, part)]]
