"""Rotation by the Hadamard matrix, against the matrix itself."""

import numpy as np
import pytest

from kvtier.codecs import reference
from kvtier.codecs.layout import Field, layout
from kvtier.codecs.plan import parse_plan, resolve
from kvtier.spec import KVSpec
from kvtier.testing.kv import random_kv, same_bits
from tests.codec_cases import body_of, layers_of

SIZES = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]


def hadamard(size: int) -> np.ndarray:
    """Sylvester's construction over the root of the size."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


@pytest.mark.parametrize("size", SIZES)
def test_rotating_multiplies_by_the_matrix_which_is_its_own_inverse(size: int) -> None:
    matrix = hadamard(size)
    assert np.array_equal(matrix, matrix.T)
    assert np.allclose(matrix @ matrix, np.eye(size), atol=1e-12)
    rows = np.random.default_rng(size).standard_normal((3, 2, 2 * size), np.float32)
    want = (rows.reshape(-1, size).astype(np.float64) @ matrix).reshape(rows.shape)
    got = reference.rotate(rows, size)
    assert got.dtype == np.float32
    assert np.allclose(got, want, rtol=0, atol=2.0**-20 * np.sqrt(size))
    assert np.allclose(reference.rotate(got, size), rows, rtol=0, atol=2.0**-19 * np.sqrt(size))


@pytest.mark.parametrize(("dim", "size"), [(64, 64), (80, 16), (96, 32), (576, 64), (7, 0), (6, 2), (1100, 4)])
def test_the_largest_power_of_two_that_divides_a_head_is_rotated_together(dim: int, size: int) -> None:
    spec = KVSpec(1, 2, dim, "float32", block_tokens=2)
    table = layout(resolve(parse_plan("int8/token/sym/hadamard"), spec), spec, first=True).table
    assert table[0, 0, Field.ROTATION] == size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("heads", [1, 3])
def test_kernels_rotate_every_size_as_the_specification_does(size: int, heads: int) -> None:
    spec = KVSpec(1, heads, size, "float32", v_head_dim=3 * size, block_tokens=2)
    layers, plan = random_kv(spec, 2, seed=size), "K=int8/token/sym/hadamard,V=e4m3/tensor/asym/hadamard"
    want = reference.encode(spec, plan, 1, layers)
    assert body_of(spec, plan, layers, 1) == want
    assert same_bits(layers_of(spec, plan, want, 1), reference.decode(spec, plan, 1, want))
