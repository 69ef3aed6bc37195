"""The laws that every codec obeys, as a test class to subclass.

class TestMyPlan(CodecKit):
    plan = "int8/token/sym"
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.codecs.base import Codec
from kvtier.codecs.registry import codec_for
from kvtier.errors import KVMismatch, UsageError
from kvtier.spec import KVSpec
from kvtier.testing.kv import PAGE_TOKENS, Layers, Pages, ones_like, random_kv, same_bits, tokens_of, view_of

SPECS = {
    "grouped": KVSpec(3, 2, 64, "bfloat16", block_tokens=64),
    "half": KVSpec(2, 3, 80, "float16", block_tokens=70),
    "single": KVSpec(2, 1, 7, "float32", v_head_dim=33, block_tokens=3),
    "latent": KVSpec(2, 1, 576, "bfloat16", block_tokens=65, mla=True),
    "least": KVSpec(1, 1, 1, "float16", block_tokens=2),
    "large": KVSpec(2, 8, 128, "bfloat16", block_tokens=512),
}
GUARD = 0xA5
LEFT = 77
"""Bytes before a body: bodies begin anywhere."""
POSITIONS = (0, 1, 7)

Offsets = NDArray[np.int64]
Memory = NDArray[np.uint8]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
class CodecKit:
    """Subclass it and set `plan`, or override `codec`."""

    plan: ClassVar[str]

    def codec(self, spec: KVSpec) -> Codec:
        """The codec under test."""
        return codec_for(self.plan, spec)

    def room(self, spec: KVSpec, positions: list[int]) -> tuple[Memory, Offsets]:
        """Guarded memory for the bodies of blocks at these positions, and where each begins."""
        sizes = [LEFT + self.codec(spec).nbytes(position) for position in positions]
        offsets = LEFT + np.array([sum(sizes[:i]) for i in range(len(sizes))], np.int64)
        return np.full(sum(sizes) + LEFT, GUARD, np.uint8), offsets

    def body(self, spec: KVSpec, layers: Layers, position: int) -> Memory:
        """The body of one block."""
        memory, offsets = self.room(spec, [position])
        at, where = np.array([0]), np.array([position])
        stored = self.codec(spec).encode(view_of(spec, layers), at, memory, offsets, where, range(spec.layers))
        assert stored.all()
        return memory[LEFT : LEFT + self.codec(spec).nbytes(position)]

    def decoded(self, spec: KVSpec, body: Memory, position: int, which: range | None = None) -> Layers:
        """One body decoded into arrays of ones."""
        out = ones_like(random_kv(spec, spec.block_tokens))
        every, at = range(spec.layers) if which is None else which, np.array([0])
        self.codec(spec).decode(body, at, np.array([position]), view_of(spec, out), at, every)
        return out

    def test_layers_lie_one_after_the_other(self, spec: KVSpec) -> None:
        codec = self.codec(spec)
        assert codec.spec == spec
        for position in POSITIONS:
            begins = codec.layers(position)
            assert begins.dtype == np.int64
            assert begins.shape == (spec.layers + 1,)
            assert begins[0] == 0
            assert (np.diff(begins) > 0).all()
            assert begins[-1] == codec.nbytes(position)
            assert position == 0 or np.array_equal(begins, codec.layers(1)), "all blocks but the first are alike"

    @pytest.mark.parametrize("position", POSITIONS)
    def test_encoding_writes_exactly_its_bytes(self, spec: KVSpec, position: int) -> None:
        layers, codec = random_kv(spec, spec.block_tokens), self.codec(spec)
        size, at, where = codec.nbytes(position), np.array([0]), np.array([position])
        memory = np.full(size + 2 * LEFT, GUARD, np.uint8)
        other = ~memory
        for one in (memory, other):
            assert codec.encode(view_of(spec, layers), at, one, at + LEFT, where, range(spec.layers)).all()
        inside = slice(LEFT, LEFT + size)
        assert np.array_equal(memory[inside], other[inside]), "some byte of the body was not written"
        for one, guard in ((memory, GUARD), (other, 255 - GUARD)):
            assert (one[: inside.start] == guard).all()
            assert (one[inside.stop :] == guard).all()

    def test_encoding_and_decoding_are_functions(self, spec: KVSpec) -> None:
        """Equal KV has equal bodies, equal bodies are equal KV: nothing depends on what memory held before."""
        layers = random_kv(spec, spec.block_tokens)
        body = self.body(spec, layers, 0)
        assert np.array_equal(body, self.body(spec, layers, 0))
        assert same_bits(self.decoded(spec, body, 0), self.decoded(spec, body.copy(), 0))

    @pytest.mark.parametrize("position", POSITIONS[:2])
    def test_layers_one_by_one_are_the_whole(self, spec: KVSpec, position: int) -> None:
        """Each is written to its own bytes and read from them, whatever the others' are."""
        codec, layers = self.codec(spec), random_kv(spec, spec.block_tokens)
        body, begins = self.body(spec, layers, position), codec.layers(position)
        whole = self.decoded(spec, body, position)
        for i in range(spec.layers):
            mine, one = slice(begins[i], begins[i + 1]), range(i, i + 1)
            again = np.full_like(body, GUARD)
            at, where = np.array([0]), np.array([position])
            assert codec.encode(view_of(spec, layers), at, again, at, where, one).all()
            assert np.array_equal(again[mine], body[mine])
            again[mine] = GUARD
            assert (again == GUARD).all()
            again[mine] = body[mine]
            alone = self.decoded(spec, again, position, one)
            assert same_bits([alone[i]], [whole[i]])
            untouched = [layer for j, layer in enumerate(alone) if j != i]
            assert same_bits(untouched, ones_like(untouched))

    def test_garbage_stays_inside_its_block(self, spec: KVSpec) -> None:
        codec, tokens = self.codec(spec), spec.block_tokens
        for position in POSITIONS:
            garbage = np.random.default_rng(position).integers(0, 256, codec.nbytes(position), np.uint8)
            out, at = random_kv(spec, 3 * tokens), np.array([0])
            call = garbage, at, np.array([position]), view_of(spec, out), np.array([tokens])
            codec.decode(*call, range(spec.layers))
            before = random_kv(spec, 3 * tokens)
            for outside in (0, 2 * tokens):
                assert same_bits(tokens_of(out, outside, tokens), tokens_of(before, outside, tokens))

    def test_batches_are_one_by_one(self, spec: KVSpec) -> None:
        """Blocks of several positions, in any order, of KV that overlaps."""
        codec, starts, positions = self.codec(spec), [2, 0, spec.block_tokens], [3, 0, 1]
        layers = random_kv(spec, 2 * spec.block_tokens + 1)
        memory, offsets = self.room(spec, positions)
        call = view_of(spec, layers), np.array(starts), memory, offsets, np.array(positions)
        assert codec.encode(*call, range(spec.layers)).tolist() == [True] * 3
        out = ones_like(layers)
        into = memory, offsets[1:], np.array(positions[1:]), view_of(spec, out), np.array(starts[1:])
        codec.decode(*into, range(spec.layers))
        for i, (start, offset, position) in enumerate(zip(starts, offsets, positions, strict=True)):
            alone = self.body(spec, tokens_of(layers, start, spec.block_tokens), position)
            assert np.array_equal(memory[offset : offset + codec.nbytes(position)], alone)
            if i > 0:
                assert same_bits(tokens_of(out, start, spec.block_tokens), self.decoded(spec, alone, position))

    def test_pages_are_as_good_as_one_array(self, spec: KVSpec) -> None:
        """Also for blocks that begin inside a page; what is not the blocks' own stays as it was."""
        codec, tokens, every = self.codec(spec), 2 * spec.block_tokens + PAGE_TOKENS + 3, range(spec.layers)
        for begin in (0, 5, PAGE_TOKENS):
            layers, starts, positions = random_kv(spec, tokens), begin + np.arange(2) * spec.block_tokens, np.arange(2)
            pages = Pages(spec, layers, seed=begin)
            want, offsets = self.room(spec, [0, 1])
            assert codec.encode(view_of(spec, layers), starts, want, offsets, positions, every).all()
            got, _ = self.room(spec, [0, 1])
            assert codec.encode(pages.view(), starts, got, offsets, positions, every).all()
            assert np.array_equal(got, want)
            out, rest = ones_like(layers), pages.rest()
            empty = Pages(spec, out, seed=begin)
            codec.decode(want, offsets, positions, view_of(spec, out), starts, every)
            codec.decode(want, offsets, positions, empty.view(), starts, every)
            assert same_bits(empty.contiguous(), out)
            assert same_bits(empty.rest(), rest)

    def test_two_threads_agree_with_one(self, spec: KVSpec) -> None:
        codec, tokens, count = self.codec(spec), spec.block_tokens, 4
        layers, starts, positions = random_kv(spec, count * tokens), np.arange(count) * tokens, np.arange(count)
        memory, offsets = self.room(spec, list(range(count)))
        again, every = memory.copy(), range(spec.layers)
        one, two = ones_like(layers), ones_like(layers)
        assert codec.encode(view_of(spec, layers), starts, memory, offsets, positions, every).all()
        codec.decode(memory, offsets, positions, view_of(spec, one), starts, every)

        def half(which: slice) -> None:
            at, here, where = starts[which], offsets[which], positions[which]
            codec.encode(view_of(spec, layers), at, again, here, where, every)
            codec.decode(again, here, where, view_of(spec, two), at, every)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(half, (slice(0, None, 2), slice(1, None, 2))))
        assert np.array_equal(memory, again)
        assert same_bits(one, two)

    def test_read_only_memory_is_read_and_not_written(self, spec: KVSpec) -> None:
        layers, at = random_kv(spec, spec.block_tokens), np.array([0])
        body = self.body(spec, layers, 0)
        frozen = np.frombuffer(body.tobytes(), np.uint8)
        assert same_bits(self.decoded(spec, frozen, 0), self.decoded(spec, body, 0))
        with pytest.raises(UsageError, match="read-only"):
            self.codec(spec).encode(view_of(spec, layers), at, frozen, at, at, range(spec.layers))

    def test_read_only_kv_is_refused_as_a_target(self, spec: KVSpec) -> None:
        layers, at = random_kv(spec, spec.block_tokens), np.array([0])
        body = self.body(spec, layers, 0)
        for layer in layers:
            for part in layer:
                part.flags.writeable = False
        with pytest.raises(KVMismatch, match="read-only"):
            self.codec(spec).decode(body, at, at, view_of(spec, layers), at, range(spec.layers))

    def test_kv_of_another_spec_is_refused(self, spec: KVSpec) -> None:
        other = KVSpec(spec.layers, 2, 5, "float32", block_tokens=spec.block_tokens)
        codec, view, at = self.codec(spec), view_of(other, random_kv(other, spec.block_tokens)), np.array([0])
        memory = np.full(codec.nbytes(0), GUARD, np.uint8)
        with pytest.raises(KVMismatch):
            codec.encode(view, at, memory, at, at, range(spec.layers))
        with pytest.raises(KVMismatch):
            codec.decode(memory, at, at, view, at, range(spec.layers))

    @pytest.mark.parametrize("position", POSITIONS[:2])
    def test_nothing_is_touched_outside_of_memory_or_kv(self, spec: KVSpec, position: int) -> None:
        codec, layers, every = self.codec(spec), random_kv(spec, spec.block_tokens), range(spec.layers)
        memory, where = np.full(codec.nbytes(position) + 8, GUARD, np.uint8), np.array([position])
        wrong = [(0, -1, every), (0, 9, every), (1, 0, every), (-1, 0, every), (0, 0, range(spec.layers + 1))]
        for token, offset, which in wrong:
            view, at, here = view_of(spec, layers), np.array([token]), np.array([offset])
            with pytest.raises(UsageError):
                codec.encode(view, at, memory, here, where, which)
            with pytest.raises(UsageError):
                codec.decode(memory, here, where, view, at, which)
        assert (memory == GUARD).all()
        assert same_bits(layers, random_kv(spec, spec.block_tokens))

    @pytest.mark.parametrize("position", POSITIONS[:2])
    def test_a_body_that_was_cut_is_refused_wherever_it_was_cut(self, spec: KVSpec, position: int) -> None:
        codec, layers, at = self.codec(spec), random_kv(spec, spec.block_tokens), np.array([0])
        body, begins = self.body(spec, layers, position), codec.layers(position).tolist()
        out = ones_like(layers)
        for cut in {0, 1, len(body) - 1, *begins[:-1], *(begin - 1 for begin in begins[1:])}:
            short = body[:cut]
            with pytest.raises(UsageError, match="outside of memory"):
                codec.decode(short, at, np.array([position]), view_of(spec, out), at, range(spec.layers))
            with pytest.raises(UsageError, match="outside of memory"):
                codec.encode(view_of(spec, layers), at, short, at, np.array([position]), range(1))
        assert same_bits(out, ones_like(layers))

    def test_each_block_has_one_token_one_offset_and_one_position(self, spec: KVSpec) -> None:
        codec, view = self.codec(spec), view_of(spec, random_kv(spec, spec.block_tokens))
        memory, _ = self.room(spec, [0, 1])
        one, two = np.array([0]), np.array([0, 0])
        for tokens, offsets, positions in ((two, one, one), (one, two, one), (one, one, two)):
            with pytest.raises(UsageError, match="each block has one of each"):
                codec.encode(view, tokens, memory, offsets, positions, range(spec.layers))
            with pytest.raises(UsageError, match="each block has one of each"):
                codec.decode(memory, offsets, positions, view, tokens, range(spec.layers))

    def test_no_blocks_is_no_work(self, spec: KVSpec) -> None:
        none, memory = np.array([], np.int64), np.empty(0, np.uint8)
        view = view_of(spec, random_kv(spec, 0))
        assert self.codec(spec).encode(view, none, memory, none, none, range(spec.layers)).shape == (0,)
        self.codec(spec).decode(memory, none, none, view, none, range(spec.layers))
