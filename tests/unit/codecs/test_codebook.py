"""The levels derived again, and held against the table they are named after."""

import math
from itertools import pairwise

import numpy as np
import pytest

from kvtier.codecs.codebook import LEVELS, MIDPOINTS

# J. Max, Quantizing for Minimum Distortion, IRE Transactions on Information Theory 6 (1960), table I: output levels,
# and the mean squared error, for N = 4, 8 and 16.
PRINTED = {
    2: ([0.4528, 1.510], 0.1175),
    3: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
}


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def share(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def lloyd(count: int) -> np.ndarray:
    """Positive levels: each the mean of what lies between the midpoints to its neighbours, until nothing changes."""
    levels = np.linspace(0.2, 2.5, count)
    while True:
        edges = [0.0, *((levels[1:] + levels[:-1]) / 2), math.inf]
        means = [(density(low) - density(high)) / (share(high) - share(low)) for low, high in pairwise(edges)]
        if np.abs(means - levels).max() < 1e-13:
            return np.array(means)
        levels = np.array(means)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_where_lloyds_iteration_ends(bits: int) -> None:
    levels = lloyd(2 ** (bits - 1))
    assert np.abs(LEVELS[bits] - levels).max() < 1e-7 * levels.max()
    assert np.abs(MIDPOINTS[bits] - (levels[1:] + levels[:-1]) / 2).max() < 1e-7 * levels.max()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_the_printed_ones(bits: int) -> None:
    levels, error = PRINTED[bits]
    assert np.allclose(LEVELS[bits], levels, rtol=5e-4)
    # E (x - q)^2 = 1 - E q^2 where every level is the mean of what it stands for.
    edges = [0.0, *MIDPOINTS[bits].astype(float), math.inf]
    shares = np.array([share(high) - share(low) for low, high in pairwise(edges)])
    assert 1 - 2 * (shares * LEVELS[bits].astype(float) ** 2).sum() == pytest.approx(error, rel=1e-3)
