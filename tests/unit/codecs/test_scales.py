"""Hard rows, with the expected numbers worked out by hand."""

import numpy as np
import pytest

from tests.codec_cases import body_of, latent, layers_of


def stored(row: list[float], scheme: str, dtype: str = "float32") -> tuple[list[int], float, float, list[float]]:
    """Of one row its codes, its scale, its zero point (0 if it has none), and what decoding gives."""
    spec, layers = latent([row], dtype)
    body = body_of(spec, scheme, layers)
    assert body is not None
    scale, zero = np.frombuffer(body[32:36], np.float16).astype(float)
    out = layers_of(spec, scheme, body)[0][0].ravel()
    if dtype == "float16":
        out = out.view(np.float16)
    return list(body[: len(row)]), scale, zero, out.tolist()


def int8(row: list[float], dtype: str = "float32") -> tuple[list[int], float, list[float]]:
    """Codes from -127 to 127."""
    codes, scale, _, out = stored(row, "int8/token/sym", dtype)
    return [code - 128 for code in codes], scale, out


def asym(row: list[float]) -> tuple[list[int], float, float, list[float]]:
    return stored(row, "int8/token/asym")


def test_a_row_whose_scale_is_a_float16() -> None:
    assert int8([127.0, -127.0, 1.0, 0.5, 1.5, 0.0]) == ([127, -127, 1, 0, 2, 0], 1.0, [127, -127, 1, 0, 2, 0])


def test_a_scale_is_rounded_up_to_a_float16() -> None:
    # 128 / 127 = 1.00787...; float16 has steps of 1/1024 there: 1.0087890625 is the next above 1.0078125
    codes, scale, _ = int8([128.0])
    assert (codes, scale) == ([127], 1.0087890625)


def test_zeros_come_back_as_zeros() -> None:
    assert int8([0.0, -0.0, 0.0]) == ([0, 0, 0], 0.0, [0.0, 0.0, 0.0])


def test_a_constant_row_comes_back_within_half_a_scale() -> None:
    codes, scale, out = int8([0.3] * 5)
    assert codes == [127] * 5
    assert all(abs(x - 0.3) <= scale / 2 for x in out)


def test_an_outlier_leaves_zeros_beside_it() -> None:
    assert int8([12700.0, 49.0, 51.0]) == ([127, 0, 1], 100.0, [12700.0, 0.0, 100.0])


@pytest.mark.parametrize(("value", "scale"), [(2.0**-26, 2.0**-24), (1e-30, 2.0**-24), (1e-45, 0.0)])
def test_values_below_the_smallest_scale_come_back_as_zero(value: float, scale: float) -> None:
    """The last is the least float32; a 127th of it is nothing."""
    assert int8([value, -value]) == ([0, 0], scale, [0.0, 0.0])


def test_small_rows_use_subnormal_scales() -> None:
    # 200 * 2**-24 / 127 = 1.57 * 2**-24, rounded up to 2 * 2**-24
    assert int8([200 * 2.0**-24, 2.0**-23]) == ([100, 1], 2.0**-23, [200 * 2.0**-24, 2.0**-23])


def test_the_largest_float16_does_not_become_infinite() -> None:
    # 65504 / 127 = 515.78; steps are 0.5 there, so 516, and 127 * 516 = 65532 is more than a float16 holds
    codes, scale, out = int8([65504.0, -65504.0], "float16")
    assert (codes, scale, out) == ([127, -127], 516.0, [65504.0, -65504.0])


def test_a_zero_point_is_rounded_down() -> None:
    # float16 has steps of 2 from 2048 on: 2049 becomes 2048, so that code 0 is below the least value, and from there
    # it is 256 to 2304: 255 steps of 1.0039216, of which the next float16 is 1.0048828125 = 1 + 5 / 1024
    codes, scale, zero, out = asym([2049.0, 2304.0])
    assert (codes, scale, zero) == ([1, 255], 1.0048828125, 2048.0)
    assert out == [2048 + 1.0048828125, 2048 + 255 * 1.0048828125]


def test_a_negative_zero_point_is_rounded_away_from_zero() -> None:
    # -2049 becomes -2050; to -1795 it is 255
    codes, scale, zero, out = asym([-2049.0, -1795.0])
    assert (codes, scale, zero, out) == ([1, 255], 1.0, -2050.0, [-2049.0, -1795.0])


def test_less_than_nothing_is_below_zero() -> None:
    # the least float16 below -1e-30 is -2**-24
    codes, scale, zero, _ = asym([-1e-30, 255 * 2.0**-24])
    assert (scale, zero) == (2 * 2.0**-24, -(2.0**-24))
    assert codes == [0, 128]  # 0.5 to 0, the even one; 256 / 2


def test_a_group_above_the_largest_float16_has_that_for_a_zero_point() -> None:
    # 65504 is the largest; 66014 - 65504 = 510
    codes, scale, zero, out = asym([65759.0, 66014.0])
    assert (codes, scale, zero, out) == ([128, 255], 2.0, 65504.0, [65760.0, 66014.0])


def test_a_constant_group_of_a_float16_is_its_zero_point() -> None:
    assert asym([-3.5] * 4) == ([0] * 4, 0.0, -3.5, [-3.5] * 4)


def test_clipping_gives_up_the_outlier_where_that_is_better() -> None:
    # 2 bits without zero point: -s, 0, s. 100 values of 1 and one of 1.5: s = 1.5 makes errors of 0.5, a hundred times;
    # shares of 1 - 0.08 i reach 1.5 * 0.68 = 1.02, with which the hundred are 0.02 off and the outlier 0.48. The next
    # share, 0.6, is 0.9, and 0.1 off.
    spec, layers = latent([[1.0] * 100 + [1.5]])
    body = body_of(spec, "int2/token/sym/clip", layers)
    scale = float(np.frombuffer(body[32:34], np.float16)[0])
    # In steps of 1/1024 1.02 is 1044.5
    assert scale == 1045 / 1024
    whole = body_of(spec, "int2/token/sym", layers)
    assert float(np.frombuffer(whole[32:34], np.float16)[0]) == 1.5


def test_clipping_keeps_the_range_where_nothing_stands_out() -> None:
    spec, layers = latent([[-7.0, 7.0, 3.0, -3.0]])
    assert body_of(spec, "int4/token/sym/clip", layers) == body_of(spec, "int4/token/sym", layers)
