"""Laws of pruning, whatever the policy, the model and the calls."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.pruning import (
    ByHead,
    KeyNorm,
    Length,
    Mass,
    Policy,
    Pruner,
    Pyramid,
    Ratio,
    Recency,
    Rope,
    Threshold,
    Window,
)

ROPE = Rope(torch.tensor([1.0, 0.1]))
DIM = 4

amounts = st.builds(Length, st.integers(1, 80)) | st.builds(Ratio, st.floats(0.01, 1))
by_layer = amounts | st.builds(Pyramid, amounts, st.integers(1, 30))
by_head = st.builds(ByHead, by_layer, st.floats(0, 1))
windows = st.builds(Window, st.integers(1, 8), st.sampled_from([1, 3, 7]), st.sampled_from(["max", "mean"]))
means = st.just(Mass(mean=True)) | windows
pairs = st.one_of(
    st.tuples(st.just(Recency()) | st.just(Mass()) | means, by_layer | by_head),
    st.tuples(st.just(KeyNorm()), by_layer),
    st.tuples(means, st.builds(Threshold, st.floats(1e-4, 0.5))),
)


@st.composite
def policies(draw):
    scorer, budget = draw(pairs)
    return Policy(
        scorer,
        budget,
        sinks=draw(st.integers(0, 6)),
        recent=draw(st.integers(scorer.window, 20)),
        recent_share=draw(st.floats(0, 1)) if budget.mean(100) else 0.0,
        whole=draw(st.sampled_from([0, 0, 0, 30])),
        compact=draw(st.booleans()),
    )


class Sequence:
    def __init__(self, policy, layers, kv_heads, group, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.pruner = Pruner(policy, layers, rope=ROPE)
        self.heads = kv_heads * group
        self.kv = [(torch.empty(kv_heads, 0, DIM),) * 2] * layers
        self.values = [torch.empty(kv_heads, 0, DIM)] * layers

    def grow(self, count):
        for layer, kv in enumerate(self.kv):
            heads = kv[0].shape[0]
            keys, values = torch.randn(2, heads, count, DIM, generator=self.generator)
            self.kv[layer] = tuple(torch.cat(pair, 1) for pair in zip(kv, (keys, values), strict=True))
            self.values[layer] = torch.cat([self.values[layer], values], 1)
            queries = torch.randn(self.heads, count, DIM, generator=self.generator)
            self.pruner.observe(layer, queries, self.kv[layer][0])


@settings(max_examples=80, deadline=None)
@given(
    policies(),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_what_stays(policy, layers, kv_heads, group, calls, seed):
    sequence = Sequence(policy, layers, kv_heads, group, seed)
    pruner = sequence.pruner
    for call in calls:
        sequence.grow(call)
        held = [pruner.positions(layer) for layer in range(layers)]
        sequence.kv = pruner.prune(sequence.kv)
        length = pruner.length
        sinks = set(range(min(policy.sinks, length)))
        recent = set(range(max(0, length - policy.youngest(length)), length))
        for layer, (keys, values) in enumerate(sequence.kv):
            positions = pruner.positions(layer)
            assert keys.shape == values.shape == (*positions.shape, DIM)
            for head, row in enumerate(positions.tolist()):
                kept = [position for position in row if position >= 0]
                assert row == [-1] * (len(row) - len(kept)) + kept, "padding is in front"
                assert kept == sorted(set(kept)), "in order, none twice"
                assert sinks | recent <= set(kept), "the protected stay"
                assert set(kept) <= set(held[layer][head].tolist()), "what is gone is gone"
                assert kept[0] >= 0 if kept else length == 0, "something stays"
                original = sequence.values[layer][head, kept]
                assert torch.equal(values[head, len(row) - len(kept) :], original), "values are those of the positions"
                assert not values[head, : len(row) - len(kept)].any()
    assert pruner.length == sum(calls)


@settings(max_examples=60, deadline=None)
@given(policies(), st.integers(1, 5), st.integers(1, 3), st.integers(31, 120), st.integers(0, 9))
def test_budgets_sum_as_promised(policy, layers, kv_heads, length, seed):
    """Of a sequence that is pruned for the first time: to the token, unless the protected are more than the budget."""
    sequence = Sequence(policy, layers, kv_heads, 2, seed)
    sequence.grow(length)
    chosen = sequence.pruner.choose(sequence.kv)
    mean = policy.budget.mean(length)
    protected = len(set(range(policy.sinks)) | set(range(max(0, length - policy.youngest(length)), length)))
    if mean and mean >= protected:
        assert sum(sum(kept.counts) for kept in chosen) == mean * layers * kv_heads
    elif mean:
        assert all(count == protected for kept in chosen for count in kept.counts)
    if not policy.budget.by_head and mean:
        assert all(kept.even for kept in chosen)


@settings(max_examples=30, deadline=None)
@given(policies(), st.integers(1, 3), st.integers(2, 80), st.integers(0, 9))
def test_more_budget_keeps_what_less_keeps(policy, kv_heads, length, seed):
    """Of one layer with nothing but its own scores to decide by."""
    if not isinstance(policy.budget, Length | Ratio):
        return
    kept = []
    for budget in (Length(max(1, length // 3)), Length(max(1, length // 2))):
        plain = Policy(policy.scorer, budget, sinks=policy.sinks, recent=policy.recent, whole=0)
        sequence = Sequence(plain, 1, kv_heads, 2, seed)
        sequence.grow(length)
        kept.append(sequence.pruner.choose(sequence.kv)[0].positions.tolist())
    assert all(set(less) <= set(more) for less, more in zip(*kept, strict=True))


@settings(max_examples=30, deadline=None)
@given(policies(), st.integers(1, 3), st.integers(1, 80), st.integers(0, 9))
def test_packed_is_padded_without_padding(policy, kv_heads, length, seed):
    sequence = Sequence(policy, 1, kv_heads, 2, seed)
    sequence.grow(length)
    kept = sequence.pruner.choose(sequence.kv)[0]
    keys = sequence.kv[0][0]
    padded, packed = kept.gather(keys), kept.packed(keys)
    heads = packed.split(kept.counts)
    assert len(packed) == sum(kept.counts)
    for head, count in enumerate(kept.counts):
        assert torch.equal(padded[head, padded.shape[1] - count :], heads[head])
