"""Turning keys, against complex numbers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtier.errors import UnsupportedKV
from kvtier.pruning import Rope

FREQUENCIES = 10000.0 ** (-torch.arange(0, 8, 2) / 8)


def placed(raw, positions, frequencies=FREQUENCIES):
    """Keys at positions: pairs (i, i + n/2) as complex numbers, turned."""
    half = len(frequencies)
    raw = raw.double().numpy()
    pairs = raw[..., :half] + 1j * raw[..., half : 2 * half]
    pairs = pairs * np.exp(1j * np.asarray(positions)[..., None] * frequencies.double().numpy())
    return np.concatenate([pairs.real, pairs.imag, raw[..., 2 * half :]], -1)


@pytest.mark.parametrize("dim", [8, 12])
def test_keys_turned_are_those_computed_there(dim):
    raw = torch.randn(2, 5, dim, generator=torch.Generator().manual_seed(0))
    old = torch.tensor([[0, 7, 900, 4000, 100_000], [3, 4, 5, 6, 7]])
    new = torch.tensor([[0, 1, 2, 3, 4], [30, 31, 32, 33, 90_000]])
    turned = Rope(FREQUENCIES).turn(torch.from_numpy(placed(raw, old)).float(), new - old)
    np.testing.assert_allclose(turned.numpy(), placed(raw, new), atol=2e-6)


def test_nothing_moves_by_nothing():
    keys = torch.randn(1, 4, 8)
    assert torch.equal(Rope(FREQUENCIES).turn(keys, torch.zeros(1, 4, dtype=torch.int64)), keys)


def model(kind="default", *tables):
    return SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(rope_parameters={"rope_type": kind})),
        named_buffers=lambda: [(f"rotary{i}.inv_freq", table) for i, table in enumerate(tables)],
    )


def test_frequencies_are_the_models():
    assert torch.equal(Rope.of(model("default", FREQUENCIES)).frequencies, FREQUENCIES.double())


@pytest.mark.parametrize(
    "of", [model("dynamic", FREQUENCIES), model("default"), model("default", FREQUENCIES, 2 * FREQUENCIES)]
)
def test_keys_that_cannot_be_turned_alone(of):
    with pytest.raises(UnsupportedKV, match="compact=False"):
        Rope.of(of)
