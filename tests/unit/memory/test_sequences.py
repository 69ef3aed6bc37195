"""Sequences in a preallocated pool: append and views; refusals change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.codecs.registry import codec_for
from kvtier.codecs.view import KVView
from kvtier.errors import ClosedError, ConfigError, KVMismatch, PoolFull, UsageError
from kvtier.memory.sequences import SequencePool
from kvtier.spec import KVSpec

SPEC = KVSpec(2, 2, 8, "bfloat16", v_head_dim=4, block_tokens=8)
LATENT = KVSpec(3, 1, 12, "float16", mla=True)
SMALL = 1 << 16


def random_kv(spec, tokens, seed=0):
    generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, spec.dtype)
    layers = [
        tuple(torch.randn(tokens, spec.kv_heads, dim, generator=generator).to(dtype) for dim in spec.head_dims)
        for _ in range(spec.layers)
    ]
    return [layer[0][:, 0] for layer in layers] if spec.mla else layers


def same(one, other):
    def flat(kv):
        return [part for layer in kv for part in (layer if isinstance(layer, tuple) else (layer,))]

    return all(torch.equal(a, b) for a, b in zip(flat(one), flat(other), strict=True))


@pytest.mark.parametrize("spec", [SPEC, LATENT], ids=["grouped", "latent"])
def test_a_sequence_grows_in_place_and_is_seen_in_place(spec):
    pool = SequencePool(spec, SMALL)
    whole = random_kv(spec, 20)
    parts = [
        [layer[n : n + 5] if spec.mla else tuple(p[n : n + 5] for p in layer) for layer in whole]
        for n in range(0, 20, 5)
    ]
    sequence = pool.new(20)
    sequence.append(parts[0])
    seen = sequence.kv
    for part in parts[1:]:
        sequence.append(part)
    assert same(sequence.kv, whole)
    assert same(sequence.span(5, 10), parts[1])
    assert same(seen, parts[0])
    first = seen[0] if spec.mla else seen[0][0]
    first.zero_()
    assert not (sequence.kv[0] if spec.mla else sequence.kv[0][0])[:5].any()
    assert pool.held_nbytes == 4096


def test_codecs_read_and_write_it_in_place():
    pool, codec = SequencePool(SPEC, SMALL), codec_for("int8", SPEC)
    body, at = np.zeros(codec.nbytes(0), np.uint8), np.zeros(1, np.int64)
    with pool.new(16) as source, pool.new(16) as target:
        source.append(random_kv(SPEC, 8))
        assert codec.encode(KVView.of(source.kv, SPEC), at, body, at, at, range(2)).all()
        target.extend(8)
        codec.decode(body, at, at, KVView.of(target.span(0, 8), SPEC), at, range(2))
        error = max(
            (a - b).abs().max() for x, y in zip(source.kv, target.kv, strict=True) for a, b in zip(x, y, strict=True)
        )
    assert 0 < error < 0.05
    assert pool.held_nbytes == 0


def test_what_does_not_fit_is_refused_and_changes_nothing():
    pool = SequencePool(SPEC, 4 * 4096)
    tokens = 4096 // SPEC.token_nbytes
    first, second = pool.new(2 * tokens), pool.new(tokens)
    first.append(random_kv(SPEC, 2 * tokens))
    with pytest.raises(PoolFull, match="in one piece") as caught:
        first.append(random_kv(SPEC, 1))
    assert caught.value.retryable
    assert (first.tokens, first.room, pool.held_nbytes) == (2 * tokens, 2 * tokens, 3 * 4096)
    assert same(first.kv, random_kv(SPEC, 2 * tokens))
    with pytest.raises(PoolFull):
        pool.new(3 * tokens)
    for wrong in (
        random_kv(LATENT, 3),
        random_kv(SPEC, 3)[:1],
        [tuple(p.float() for p in y) for y in random_kv(SPEC, 3)],
    ):
        with pytest.raises(KVMismatch):
            second.append(wrong)
    with pytest.raises(UsageError, match="do not fit"):
        second.extend(tokens + 1)
    with pytest.raises(UsageError, match="no span"):
        second.span(0, 1)
    with pytest.raises(UsageError, match="cannot be cut"):
        second.cut(1)
    second.close()
    second.close()
    with pytest.raises(ClosedError):
        second.append(random_kv(SPEC, 1))
    with pytest.raises(ConfigError, match="holds nothing"):
        pool.new(0)


@pytest.mark.gpu
def test_the_memory_is_page_locked_with_cuda():
    pool = SequencePool(SPEC, 1 << 20)
    sequence = pool.new(64)
    sequence.append(random_kv(SPEC, 64))
    assert pool.fault == ""
    assert all(part.is_pinned() for layer in sequence.kv for part in layer)


class SequencesMachine(RuleBasedStateMachine):
    """`held`: sequences with copies of what was appended."""

    @initialize(pages=st.integers(2, 40))
    def make(self, pages):
        self.pool, self.held, self.seed = SequencePool(SPEC, pages * 4096), [], 0

    @rule(room=st.integers(1, 150))
    def new(self, room):
        try:
            self.held.append([self.pool.new(room), random_kv(SPEC, 0)])
        except PoolFull:
            assert self.pool._slots.room(room * SPEC.token_nbytes) == 0

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.integers(0, 90))
    def append(self, data, tokens):
        one = data.draw(st.sampled_from(self.held))
        self.seed += 1
        new = random_kv(SPEC, tokens, self.seed)
        before = one[0].tokens, one[0].room, self.pool.held_nbytes
        try:
            one[0].append(new)
        except PoolFull:
            assert before == (one[0].tokens, one[0].room, self.pool.held_nbytes)
            return
        one[1] = [tuple(torch.cat(p) for p in zip(a, b, strict=True)) for a, b in zip(one[1], new, strict=True)]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), part=st.floats(0, 1))
    def cut(self, data, part):
        one = data.draw(st.sampled_from(self.held))
        tokens = round(part * one[0].tokens)
        one[0].cut(tokens)
        one[1] = [tuple(p[:tokens] for p in layer) for layer in one[1]]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close(self, data):
        one = data.draw(st.sampled_from(self.held))
        self.held.remove(one)
        one[0].close()

    @invariant()
    def sequences_have_what_was_appended(self):
        for sequence, kv in getattr(self, "held", []):
            assert sequence.tokens <= sequence.room
            assert same(sequence.kv, kv)

    def teardown(self):
        """Nothing leaks."""
        for sequence, _ in getattr(self, "held", []):
            sequence.close()
        assert not hasattr(self, "pool") or self.pool.held_nbytes == 0


TestSequences = SequencesMachine.TestCase
TestSequences.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
