"""A sequence that is pruned as it grows, against what the papers say, in slow numpy."""

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError, KVMismatch, UsageError
from kvtier.pruning import ByHead, Length, Mass, Policy, Pruner, Pyramid, Rope, h2o, snap_kv, streaming_llm
from kvtier.pruning import pruner as module

DIM = 4


class Grown:
    """One layer or several of random KV and queries, given to a pruner in calls of some sizes."""

    def __init__(self, policy, *, heads=4, kv_heads=2, layers=1, rope=None):
        self.generator = torch.Generator().manual_seed(0)
        self.pruner = Pruner(policy, layers, rope=rope)
        self.heads, self.kv_heads = heads, kv_heads
        self.kv = [tuple(torch.empty(kv_heads, 0, DIM) for _ in "kv") for _ in range(layers)]

    def grow(self, count, *, observe=True):
        queries = [torch.randn(self.heads, count, DIM, generator=self.generator) * 2 for _ in self.kv]
        new = [torch.randn(2, self.kv_heads, count, DIM, generator=self.generator) for _ in self.kv]
        self.kv = [
            tuple(torch.cat([part, fresh], 1) for part, fresh in zip(layer, more, strict=True))
            for layer, more in zip(self.kv, new, strict=True)
        ]
        if observe:
            for layer, asked in enumerate(queries):
                self.pruner.observe(layer, asked, self.kv[layer][0])
        return queries

    def prune(self):
        self.kv = self.pruner.prune(self.kv)


def h2o_step(scores, positions, weights, budget):
    """One query of H2O as its authors' code has it: add, then keep the heavy half and the recent half."""
    scores = np.append(scores, 0.0) + weights
    if len(scores) <= budget:
        return scores, positions
    recent = budget // 2
    heavy = np.sort(np.argsort(-scores[:-recent], kind="stable")[: budget - recent])
    stays = np.append(heavy, np.arange(len(scores) - recent, len(scores)))
    return scores[stays], positions[stays]


def test_h2o_token_by_token():
    """Pruned after every token, KV heads that answer one head each: the authors' algorithm."""
    grown = Grown(h2o(8, whole=0, every=1), heads=2, kv_heads=2)
    scores, positions = [np.empty(0)] * 2, [np.empty(0, int)] * 2
    keys = [np.empty((0, DIM))] * 2
    for token in range(40):
        queries = grown.grow(1)[0]
        for head in range(2):
            before = np.append(positions[head], token)
            keys[head] = np.concatenate([keys[head], grown.kv[0][0][head, -1:].numpy()])
            logits = keys[head] @ queries[head, 0].numpy() / DIM**0.5
            weights = np.exp(logits) / np.exp(logits).sum()
            scores[head], positions[head] = h2o_step(scores[head], before, weights, 8)
            keys[head] = keys[head][np.isin(before, positions[head])]
        assert grown.pruner.due
        grown.prune()
        assert grown.pruner.positions(0).tolist() == [list(each) for each in positions]
        np.testing.assert_array_equal(grown.kv[0][0], np.stack(keys))


@pytest.mark.parametrize("fold", [1, 7, 1000])
def test_mass_does_not_depend_on_how_calls_are_cut(monkeypatch, fold):
    monkeypatch.setattr(module, "FOLD", fold)
    one, many = Grown(h2o(16, whole=0)), Grown(h2o(16, whole=0))
    queries = one.grow(50)[0]
    many.kv = one.kv
    for begin, end in ((0, 1), (1, 20), (20, 21), (21, 50)):
        many.pruner.observe(0, queries[:, begin:end], one.kv[0][0][:, :end])
    (first,), (second,) = one.pruner.choose(one.kv), many.pruner.choose(many.kv)
    assert torch.equal(first.columns, second.columns)
    torch.testing.assert_close(one.pruner._layers[0].mass, many.pruner._layers[0].mass)


def test_queries_that_were_added_up_are_let_go():
    """Those of a long prompt are more than its KV; what is held is what is counted."""
    grown = Grown(h2o(16, whole=0))
    grown.grow(3000)
    layer = grown.pruner._layers[0]
    memory = {table.untyped_storage().data_ptr(): table.untyped_storage().nbytes() for table in layer.tables()}
    assert layer.pending.untyped_storage().nbytes() == 0
    assert grown.pruner.nbytes == sum(memory.values()) == 2 * 3000 * 3 * 4


def test_scores_of_what_is_dropped_are_forgotten_and_those_of_the_rest_are_not():
    grown = Grown(h2o(16, whole=0))
    grown.grow(50)
    kept = grown.pruner.choose(grown.kv)[0]
    mass = grown.pruner._layers[0].mass.gather(1, kept.columns)
    grown.prune()
    assert torch.equal(grown.pruner._layers[0].mass, mass)


def test_a_share_is_kept_however_often_is_pruned():
    grown = Grown(h2o(0.5, whole=0))
    for _ in range(10):
        grown.grow(100)
        grown.prune()
    assert grown.kv[0][0].shape[1] == 500
    assert grown.pruner.length == grown.pruner.next_position == 1000


def test_due_every_so_many_tokens():
    grown = Grown(h2o(0.5, whole=0, every=10))
    grown.grow(9)
    assert not grown.pruner.due
    grown.grow(1)
    assert grown.pruner.due
    grown.prune()
    assert not grown.pruner.due


def test_tokens_that_were_not_observed_are_there_and_have_no_mass():
    """As a prefix that was loaded."""
    grown = Grown(h2o(16, whole=0))
    grown.grow(30, observe=False)
    grown.grow(20)
    grown.prune()
    assert grown.pruner.length == 50
    assert grown.pruner.positions(0)[:, -8:].tolist() == [list(range(42, 50))] * 2
    seen = grown.pruner._layers[0].seen
    assert float(seen.max()) == 20


def test_what_looks_at_no_attention_needs_no_observing():
    grown = Grown(streaming_llm(2, 6), layers=2)
    grown.grow(20, observe=False)
    grown.prune()
    assert grown.pruner.positions(1).tolist() == [[0, 1, *range(14, 20)]] * 2


@pytest.mark.parametrize("policy", [h2o(16, whole=0), snap_kv(16, window=4, whole=0)])
def test_attention_that_was_not_observed_is_an_error(policy):
    grown = Grown(policy)
    grown.grow(20, observe=False)
    with pytest.raises(UsageError, match="watched"):
        grown.prune()


def test_closed_up_positions_are_those_of_columns():
    """Keys turned at each pruning are those computed at their last positions, in layers and heads of any length."""
    rope = Rope(torch.tensor([1.0, 0.01]))
    policy = Policy(Mass(), ByHead(Pyramid(Length(24), beta=4)), recent=4, every=1, whole=0, compact=True)
    grown = Grown(policy, layers=3, rope=rope)
    raw = [torch.randn(2, 0, DIM)] * 3
    for count in (60, 1, 30):
        begin = grown.pruner.next_position
        before = [keys.shape[1] for keys, _ in grown.kv]
        grown.grow(count)
        at = torch.arange(begin, begin + count)
        for layer, (keys, values) in enumerate(grown.kv):
            fresh = keys[:, before[layer] :].clone()
            raw[layer] = torch.cat([raw[layer], fresh], 1)
            grown.kv[layer] = (torch.cat([keys[:, : before[layer]], rope.turn(fresh, at.expand(2, -1))], 1), values)
        grown.prune()
        widest = max(keys.shape[1] for keys, _ in grown.kv)
        assert grown.pruner.next_position == widest
        for layer, (keys, _) in enumerate(grown.kv):
            positions = grown.pruner.positions(layer)
            here = torch.arange(widest - keys.shape[1], widest).expand_as(positions)
            unturned = raw[layer].gather(1, positions.clamp(min=0)[..., None].expand(-1, -1, DIM))
            wanted = rope.turn(unturned, here) * (positions >= 0)[..., None]
            torch.testing.assert_close(keys, wanted, atol=1e-5, rtol=1e-5)
    assert len({keys.shape[1] for keys, _ in grown.kv}) > 1
    assert grown.pruner.length == 91


def test_queries_are_turned_with_their_tokens():
    """What a window's queries say of the window's own keys is the same before and after."""
    grown = Grown(snap_kv(12, window=4, kernel=1, whole=0, compact=True), rope=Rope(torch.tensor([1.0, 0.01])))
    grown.grow(40)
    state = grown.pruner._layers[0]

    def logits():
        return state.queries.unflatten(0, (2, 2)) @ grown.kv[0][0][:, None, -4:].transpose(2, 3)

    before, queries = logits(), state.queries
    grown.prune()
    torch.testing.assert_close(logits(), before)
    assert not torch.allclose(state.queries, queries)


def test_a_cache_that_others_cut_is_refused():
    grown = Grown(h2o(16, whole=0))
    grown.grow(20)
    with pytest.raises(UsageError, match="new Pruner"):
        grown.pruner.prune([tuple(part[:, :10] for part in grown.kv[0])])


def test_what_does_not_belong_together_is_refused():
    pruner = Pruner(h2o(), 2)
    with pytest.raises(KVMismatch):
        pruner.observe(0, torch.zeros(3, 1, DIM), torch.zeros(2, 5, DIM))
    with pytest.raises(KVMismatch):
        pruner.observe(0, torch.zeros(2, 6, DIM), torch.zeros(2, 5, DIM))
    with pytest.raises(KVMismatch):
        pruner.prune([(torch.zeros(2, 5, DIM),) * 2])
    with pytest.raises(ConfigError, match="rope"):
        Pruner(h2o(compact=True), 1)


def test_each_layer_has_a_policy_of_its_own():
    """A layer without one loses nothing and has no tables; the others are decided alone as they are together."""
    policies = [streaming_llm(2, 10), None, streaming_llm(0, 20)]
    pruners = [Pruner(policies, 3) for _ in range(2)]
    kv = [(torch.randn(2, 60, 4), torch.randn(2, 60, 4)) for _ in range(3)]
    left = pruners[0].prune(kv)
    assert [keys.shape[1] for keys, _ in left] == [12, 60, 20]
    assert pruners[0].positions(1).tolist() == [list(range(60))] * 2
    for layer, (keys, _) in enumerate(kv):
        pruners[1].observe(layer, keys[:, -1:], keys)
    for layer in (0, 2):
        kept = pruners[1].decide(layer, *kv[layer])
        assert torch.equal(kept.gather(kv[layer][0]), left[layer][0])
        assert torch.equal(pruners[1].positions(layer), pruners[0].positions(layer))
    assert not pruners[1].due
    assert pruners[1].nbytes == 2 * (12 + 20) * 4, "positions of what is held, in 4 bytes"
    with pytest.raises(ConfigError, match="give each one"):
        Pruner(policies, 4)
    with pytest.raises(ConfigError, match="not all None"):
        Pruner([None, None], 2)
    with pytest.raises(ConfigError, match="in all layers or in none"):
        Pruner([streaming_llm(compact=True), None], 2, rope=Rope(torch.ones(2)))
