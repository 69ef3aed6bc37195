"""What each scorer says, worked out by hand or in numpy."""

import math

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError, UsageError
from kvtier.pruning import Evidence, KeyNorm, Mass, Pruner, Recency, Threshold, Window, h2o
from kvtier.pruning.policy import Policy


def evidence(keys, **rest):
    heads, tokens, _ = keys.shape
    return Evidence(keys, keys, torch.arange(tokens).expand(heads, tokens), tokens, 1.0, **rest)


def test_mass_is_what_h2o_accumulates():
    # One head of one dimension, keys 1, 0, 0. Query 0 sees itself alone. Query ln 3 sees keys 1 and 0 with weights
    # 3/4 and 1/4, query ln 2 keys 1, 0, 0 with 2/4, 1/4, 1/4.
    queries = torch.tensor([[[5.0], [math.log(3)], [math.log(2)]]])
    keys = torch.tensor([[[1.0], [0.0], [0.0]]])
    pruner = Pruner(h2o(whole=0), 1)
    for count in (1, 2, 3):
        pruner.observe(0, queries[:, count - 1 : count], keys[:, :count], scale=1.0)
    seen = pruner._layers[0].evidence(keys, keys)
    torch.testing.assert_close(Mass().score(seen), torch.tensor([[2.25, 0.5, 0.25]]))
    torch.testing.assert_close(Mass(mean=True).score(seen), torch.tensor([[2.25 / 3, 0.5 / 2, 0.25]]))


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_window_pools_what_is_before_the_window(pool):
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(1, 12, 4, generator=generator), torch.randn(2, 3, 4, generator=generator)
    plain = Window(3, 1).score(evidence(keys, queries=queries))[0].numpy()
    found = Window(3, 5, pool).score(evidence(keys, queries=queries))[0].numpy()
    padded = np.pad(plain[:9], 2, constant_values=-np.inf if pool == "max" else 0)
    reduce = np.max if pool == "max" else np.mean
    np.testing.assert_allclose(found[:9], [reduce(padded[i : i + 5]) for i in range(9)], rtol=1e-6)
    np.testing.assert_array_equal(found[9:], plain[9:])
    np.testing.assert_allclose(plain.sum(), 1, rtol=1e-6)


def test_window_asks_with_its_last_queries_only():
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(1, 12, 4, generator=generator), torch.randn(2, 8, 4, generator=generator)
    last = Window(3).score(evidence(keys, queries=queries[:, -3:]))
    torch.testing.assert_close(Window(3).score(evidence(keys, queries=queries)), last)


def test_short_keys_are_better():
    keys = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [2.0, 0.0]]])
    assert KeyNorm().score(evidence(keys)).tolist() == [[-5, -1, -2]]


def test_the_younger_the_better():
    assert Recency().score(evidence(torch.zeros(1, 3, 2))).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("scorer", [Mass(), Mass(mean=True), Window()])
def test_attention_that_was_not_observed_is_an_error(scorer):
    with pytest.raises(UsageError, match="watched"):
        scorer.score(evidence(torch.zeros(1, 3, 2)))


@pytest.mark.parametrize("wrong", [{"window": 0}, {"kernel": 4}, {"kernel": 0}, {"pool": "sum"}])
def test_windows_that_cannot_be(wrong):
    with pytest.raises(ConfigError):
        Window(**wrong)


def test_a_threshold_needs_weights():
    with pytest.raises(ConfigError, match="mean=True"):
        Policy(Mass(), Threshold(0.001))
