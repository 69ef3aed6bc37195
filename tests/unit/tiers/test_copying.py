"""Which ranges one batch of the GPU tier copies."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.block import PAGE, slot_nbytes
from kvtier.memory.filling import STEP
from kvtier.tiers.base import STORED
from kvtier.tiers.copying import Copy, runs


def copies(slots: list[tuple[int, int, int]]) -> list[Copy]:
    """Of (outside, inside, payload bytes)."""
    made = []
    for outside, inside, nbytes in slots:
        record = np.zeros((), STORED)
        record["nbytes"] = nbytes
        made.append(Copy(0, b"", outside, inside, record))
    return made


def test_neighbours_on_both_sides_are_one_copy():
    slots = [(i * 2 * PAGE, 8 * PAGE + i * 2 * PAGE, PAGE + 1) for i in (2, 0, 1)]
    assert list(runs(copies(slots))) == [(0, 8 * PAGE, 6 * PAGE)]


def test_neighbours_on_one_side_only_are_not():
    assert len(list(runs(copies([(0, 0, PAGE), (PAGE, 2 * PAGE, PAGE)])))) == 2


def test_a_run_is_cut_where_the_arena_is_pinned_apart():
    slots = [(STEP - PAGE, 0, PAGE), (STEP, PAGE, 3 * PAGE)]
    assert list(runs(copies(slots))) == [(STEP - PAGE, 0, PAGE), (STEP, PAGE, 3 * PAGE)]
    assert list(runs(copies([(STEP - PAGE, 0, 4 * PAGE)]))) == [(STEP - PAGE, 0, PAGE), (STEP, PAGE, 3 * PAGE)]


sizes = st.lists(st.tuples(st.integers(1, 5 * PAGE), st.booleans(), st.booleans()), max_size=12)


@given(sizes, st.permutations(range(12)), st.integers(0, 40))
def test_every_page_of_every_slot_goes_once_to_its_place(wanted, order, before):
    outside, inside, slots = STEP - before * PAGE, 0, []
    for nbytes, gap_outside, gap_inside in wanted:
        outside, inside = outside + PAGE * gap_outside, inside + PAGE * gap_inside
        slots.append((outside, inside, nbytes))
        outside, inside = outside + slot_nbytes(nbytes), inside + slot_nbytes(nbytes)
    pages = {o + at: i + at for o, i, nbytes in slots for at in range(0, slot_nbytes(nbytes), PAGE)}
    shuffled = [slots[i] for i in order if i < len(slots)]
    found: dict[int, int] = {}
    for start, at, nbytes in runs(copies(shuffled)):
        assert start // STEP == (start + nbytes - 1) // STEP
        for page in range(0, nbytes, PAGE):
            assert start + page not in found
            found[start + page] = at + page
    assert found == pages
