"""The laws that every codec obeys, as a test class to subclass.

class TestMyCodec(CodecKit):
    codec = MyCodec()
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.codecs.base import Codec
from kvtier.codecs.view import KVView
from kvtier.errors import KVMismatch, UsageError
from kvtier.spec import KVSpec

SPECS = {
    "grouped": KVSpec(3, 2, 64, "bfloat16", block_tokens=8),
    "half": KVSpec(2, 3, 80, "float16", block_tokens=5),
    "single": KVSpec(2, 1, 7, "float32", v_head_dim=33, block_tokens=3),
    "latent": KVSpec(2, 1, 576, "bfloat16", block_tokens=4, mla=True),
    "least": KVSpec(1, 1, 1, "float16", block_tokens=1),
    "large": KVSpec(2, 8, 128, "bfloat16", block_tokens=1024),
}
GUARD = 0xA5
LEFT = 77
"""Bytes before a body: bodies begin anywhere."""

Layers = list[list[NDArray[Any]]]


def random_kv(spec: KVSpec, tokens: int, seed: int = 0) -> Layers:
    """Normal values as arrays `[tokens, kv_heads, dim]`; 16-bit dtypes as their bits."""
    generator = np.random.default_rng(seed)
    return [
        [as_stored(spec, generator.standard_normal((tokens, spec.kv_heads, dim), np.float32)) for dim in spec.head_dims]
        for _ in range(spec.layers)
    ]


def as_stored(spec: KVSpec, values: NDArray[np.float32]) -> NDArray[Any]:
    """Values in the spec's dtype; bfloat16 is truncated, which is good enough to make test data."""
    if spec.dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16).view(np.uint16) if spec.dtype == "float16" else values


def view_of(spec: KVSpec, layers: Layers) -> KVView:
    """A view of arrays as `random_kv` makes them."""
    return KVView.of([layer[0] if spec.mla else tuple(layer) for layer in layers], spec)


def same_bits(one: Layers, other: Layers) -> bool:
    """Whether all elements have the same bits, NaNs too."""
    return all(
        np.array_equal(a.view(np.uint8), b.view(np.uint8))
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
class CodecKit:
    """Subclass it and set `codec`."""

    codec: ClassVar[Codec]

    def encoded(self, spec: KVSpec, layers: Layers, starts: list[int]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Bodies of the blocks that begin at these tokens, in guarded memory, and where they begin."""
        size = self.codec.nbytes(spec, 0)
        offsets = LEFT + np.arange(len(starts), dtype=np.int64) * (size + LEFT)
        memory = np.full(LEFT + len(starts) * (size + LEFT), GUARD, np.uint8)
        every = range(spec.layers)
        stored = self.codec.encode(spec, view_of(spec, layers), np.array(starts), memory, offsets, every)
        assert stored.all()
        return memory, offsets

    def decoded(self, spec: KVSpec, body: NDArray[np.uint8], layers: range | None = None) -> Layers:
        """One body decoded into arrays of ones."""
        out = [[np.ones_like(part) for part in layer] for layer in random_kv(spec, spec.block_tokens)]
        every = range(spec.layers) if layers is None else layers
        self.codec.decode(spec, body, np.array([0]), view_of(spec, out), np.array([0]), every)
        return out

    def body(self, spec: KVSpec, layers: Layers) -> NDArray[np.uint8]:
        """The body of one block."""
        memory, _ = self.encoded(spec, layers, [0])
        return memory[LEFT : LEFT + self.codec.nbytes(spec, 0)]

    def test_nbytes_is_layers_times_layer_nbytes(self, spec: KVSpec) -> None:
        assert self.codec.nbytes(spec, 0) == spec.layers * self.codec.layer_nbytes(spec, 0)

    def test_encoding_writes_exactly_its_bytes(self, spec: KVSpec) -> None:
        layers = random_kv(spec, spec.block_tokens)
        size = self.codec.nbytes(spec, 0)
        memory = np.full(size + 2 * LEFT, GUARD, np.uint8)
        other = ~memory
        for one in (memory, other):
            call = spec, view_of(spec, layers), np.array([0]), one, np.array([LEFT])
            assert self.codec.encode(*call, range(spec.layers)).all()
        inside = slice(LEFT, LEFT + size)
        assert np.array_equal(memory[inside], other[inside]), "some byte of the body was not written"
        for one, guard in ((memory, GUARD), (other, 255 - GUARD)):
            assert (one[: inside.start] == guard).all()
            assert (one[inside.stop :] == guard).all()

    def test_encoding_and_decoding_are_functions(self, spec: KVSpec) -> None:
        """Equal KV has equal bodies, equal bodies are equal KV: nothing depends on what memory held before."""
        layers = random_kv(spec, spec.block_tokens)
        body = self.body(spec, layers)
        assert np.array_equal(body, self.body(spec, layers))
        assert same_bits(self.decoded(spec, body), self.decoded(spec, body.copy()))

    def test_layers_one_by_one_are_the_whole(self, spec: KVSpec) -> None:
        layers = random_kv(spec, spec.block_tokens)
        body = self.body(spec, layers)
        whole, pieces = self.decoded(spec, body), []
        for i in range(spec.layers):
            alone = self.decoded(spec, body, range(i, i + 1))
            untouched = [layer for j, layer in enumerate(alone) if j != i]
            assert all((part == 1).all() for layer in untouched for part in layer)
            pieces.append(alone[i])
        assert same_bits(whole, pieces)
        again = np.zeros_like(body)
        for i in reversed(range(spec.layers)):
            call = spec, view_of(spec, layers), np.array([0]), again, np.array([0])
            self.codec.encode(*call, range(i, i + 1))
        assert np.array_equal(body, again)

    def test_garbage_stays_inside_its_block(self, spec: KVSpec) -> None:
        size, tokens = self.codec.nbytes(spec, 0), spec.block_tokens
        for seed in range(3):
            garbage = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
            out = random_kv(spec, 3 * tokens)
            before = [[part.copy() for part in layer] for layer in out]
            call = spec, garbage, np.array([0]), view_of(spec, out), np.array([tokens])
            self.codec.decode(*call, range(spec.layers))
            for outside in (slice(0, tokens), slice(2 * tokens, None)):
                assert same_bits([[p[outside] for p in y] for y in out], [[p[outside] for p in y] for y in before])

    def test_batches_are_one_by_one(self, spec: KVSpec) -> None:
        size, starts = self.codec.nbytes(spec, 0), [2, 0, spec.block_tokens]
        layers = random_kv(spec, 2 * spec.block_tokens + 1)
        memory, offsets = self.encoded(spec, layers, starts)
        for start, offset in zip(starts, offsets, strict=True):
            alone = self.body(spec, [[part[start : start + spec.block_tokens] for part in layer] for layer in layers])
            assert np.array_equal(memory[offset : offset + size], alone)

    def test_two_threads_agree_with_one(self, spec: KVSpec) -> None:
        tokens, size = spec.block_tokens, self.codec.nbytes(spec, 0)
        layers = random_kv(spec, 8 * tokens)
        starts = np.arange(8) * tokens
        memory, offsets = self.encoded(spec, layers, list(starts))
        again = np.full_like(memory, GUARD)
        one, two = ([[np.ones_like(part) for part in layer] for layer in layers] for _ in range(2))
        self.codec.decode(spec, memory, offsets, view_of(spec, one), starts, range(spec.layers))

        def half(which: slice) -> None:
            at, here, every = starts[which], offsets[which], range(spec.layers)
            self.codec.encode(spec, view_of(spec, layers), at, again, here, every)
            self.codec.decode(spec, again, here, view_of(spec, two), at, every)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(half, (slice(0, None, 2), slice(1, None, 2))))
        assert np.array_equal(memory, again)
        assert same_bits(one, two)
        assert size > 0

    def test_read_only_memory_is_read_and_not_written(self, spec: KVSpec) -> None:
        layers = random_kv(spec, spec.block_tokens)
        body = self.body(spec, layers)
        frozen = np.frombuffer(body.tobytes(), np.uint8)
        assert same_bits(self.decoded(spec, frozen), self.decoded(spec, body))
        with pytest.raises(UsageError):
            self.codec.encode(spec, view_of(spec, layers), np.array([0]), frozen, np.array([0]), range(spec.layers))

    def test_read_only_kv_is_refused_as_a_target(self, spec: KVSpec) -> None:
        layers = random_kv(spec, spec.block_tokens)
        body = self.body(spec, layers)
        for layer in layers:
            for part in layer:
                part.flags.writeable = False
        with pytest.raises(KVMismatch):
            self.codec.decode(spec, body, np.array([0]), view_of(spec, layers), np.array([0]), range(spec.layers))

    def test_nothing_is_touched_outside_of_memory_or_kv(self, spec: KVSpec) -> None:
        layers = random_kv(spec, spec.block_tokens)
        memory = np.full(self.codec.nbytes(spec, 0) + 8, GUARD, np.uint8)
        every = range(spec.layers)
        wrong = [(0, -1, every), (0, 9, every), (1, 0, every), (-1, 0, every), (0, 0, range(spec.layers + 1))]
        for token, offset, which in wrong:
            view, at, here = view_of(spec, layers), np.array([token]), np.array([offset])
            with pytest.raises(UsageError):
                self.codec.encode(spec, view, at, memory, here, which)
            with pytest.raises(UsageError):
                self.codec.decode(spec, memory, here, view, at, which)
        assert (memory == GUARD).all()

    def test_no_blocks_is_no_work(self, spec: KVSpec) -> None:
        none, memory = np.array([], np.int64), np.empty(0, np.uint8)
        view = view_of(spec, random_kv(spec, 0))
        assert self.codec.encode(spec, view, none, memory, none, range(spec.layers)).shape == (0,)
        self.codec.decode(spec, memory, none, view, none, range(spec.layers))
