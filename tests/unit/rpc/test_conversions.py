from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ProtocolMismatch, UsageError
from kvtier.hierarchy.answers import GRANT, SLOT
from kvtier.rpc.conversions import pack_keys, pack_numbers, unpack_array, unpack_keys, unpack_numbers


@given(st.lists(st.binary(min_size=34, max_size=34)))
def test_keys_come_back(keys):
    packed = pack_keys(keys)
    assert len(packed) == 34 * len(keys)
    assert unpack_keys(packed) == keys


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_numbers_come_back(numbers):
    assert unpack_numbers(pack_numbers(numbers)) == numbers


@pytest.mark.parametrize("keys", [[b"x" * 33], [b"x" * 35, b"x" * 33], [b""]])
def test_addresses_of_another_length_are_refused(keys):
    with pytest.raises(UsageError, match="not 34"):
        pack_keys(keys)


@pytest.mark.parametrize("number", [-1, 2**32])
def test_numbers_that_do_not_fit_are_refused(number):
    with pytest.raises(UsageError, match="32 bits"):
        pack_numbers([0, number])


def test_parts_of_records_are_refused():
    with pytest.raises(ProtocolMismatch):
        unpack_keys(b"x" * 35)
    with pytest.raises(ProtocolMismatch):
        unpack_array(b"x" * 17, SLOT)


@pytest.mark.parametrize("dtype", [SLOT, GRANT])
def test_records_have_sixteen_bytes_and_come_back(dtype):
    records = np.zeros(3, dtype)
    records["offset"] = [0, 2**40, 2**63]
    records["generation"] = [1, 2**32 - 1, 3]
    assert dtype.itemsize == 16
    assert (unpack_array(records.tobytes(), dtype) == records).all()
