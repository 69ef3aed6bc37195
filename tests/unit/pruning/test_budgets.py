"""How many tokens stay, against the papers' formulas."""

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.pruning import ByHead, Length, Pyramid, Ratio, Threshold
from kvtier.pruning.budgets import Place

INF = torch.inf


def kept(budget, layers, length, protected, scores=None):
    scores = torch.zeros(2, length) if scores is None else scores
    return [budget.counts(scores, Place(layer, layers, length, protected)).tolist() for layer in range(layers)]


def test_uniform():
    assert kept(Ratio(0.7), 2, 1000, 32) == [[700, 700]] * 2
    assert kept(Length(516), 1, 1000, 32) == [[516, 516]]
    assert kept(Length(516), 1, 100, 32) == [[100, 100]]


def test_pyramid_worked_out():
    # 100 a layer beyond the window of 8: the top layer 100/20 = 5, the bottom one 2 * 100 - 5 = 195.
    assert kept(Pyramid(Length(108)), 3, 1000, 8) == [[203, 203], [108, 108], [13, 13]]


def test_pyramid_keeps_no_more_than_there_is():
    # The bottom layer has all 150 before the window, the top one what is left of 2 * 100.
    assert kept(Pyramid(Length(108)), 3, 158, 8) == [[158, 158], [108, 108], [58, 58]]


@pytest.mark.parametrize("length", [300, 900, 5000])
@pytest.mark.parametrize("layers", [2, 7, 30, 32])
@pytest.mark.parametrize(("capacity", "window"), [(64, 8), (128, 32), (271, 32)])
def test_pyramid_is_the_authors_but_for_rounding(length, layers, capacity, window):
    spare = capacity - window
    least = spare // 20
    most = 2 * spare - least
    if most >= length - window:
        most = length - window
        least = 2 * spare - most
    step = (most - least) // (layers - 1)
    theirs = [most - layer * step + window for layer in range(layers)]
    ours = [counts[0] for counts in kept(Pyramid(Length(capacity)), layers, length, window)]
    assert sum(ours) == layers * capacity
    assert ours == sorted(ours, reverse=True)
    assert all(0 <= their - our <= layer for layer, (their, our) in enumerate(zip(theirs, ours, strict=True)))


def test_pyramid_of_everything_and_of_the_window_alone():
    assert kept(Pyramid(Ratio(1.0)), 4, 100, 8) == [[100, 100]] * 4
    assert kept(Pyramid(Length(8)), 4, 100, 8) == [[8, 8]] * 4


def test_heads_share_what_a_layer_has_by_score():
    # 3 a head. Of the 6: the last token of each is protected, each head's best beyond it is its floor (.5 of 2), and
    # the two best of the rest, .4 and .3, are of head 0.
    scores = torch.tensor([[0.5, 0.4, 0.3, 0.2, INF], [0.1, 0.09, 0.08, 0.07, INF]])
    assert kept(ByHead(Length(3), floor=0.5), 1, 5, 1, scores) == [[4, 2]]
    assert kept(ByHead(Length(3), floor=1.0), 1, 5, 1, scores) == [[3, 3]]


def test_heads_do_not_share_what_is_not_there():
    scores = torch.tensor([[-INF, -INF, 0.3, INF], [0.1, 0.2, 0.25, INF]])
    assert kept(ByHead(Length(4)), 1, 4, 1, scores) == [[2, 4]]


def test_threshold_counts_what_reaches_it():
    scores = torch.tensor([[0.5, 0.001, 0.0009, INF], [-INF, -INF, 0.002, INF]])
    assert kept(Threshold(0.001), 1, 4, 1, scores) == [[3, 2]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ratio(0.0),
        lambda: Ratio(1.1),
        lambda: Length(0),
        lambda: Threshold(1.0),
        lambda: Pyramid(Ratio(0.5), beta=0),
        lambda: ByHead(Ratio(0.5), floor=1.5),
    ],
)
def test_budgets_that_cannot_be(make):
    with pytest.raises(ConfigError):
        make()
