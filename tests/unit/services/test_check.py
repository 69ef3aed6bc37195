"""What `kvtier index check` makes of the answers of hosts."""

from __future__ import annotations

import pytest

from kvtier_services.cluster.check import Compared

WELL = {"host": "a", "blocks": 10, "entries": 12, "missing": 0, "wrong": 0, "stale": 0, "dead": 0, "partly_dead": 0}
WELL |= {"mended": 0, "complete": True, "needs_publish": False, "silent": [], "examples": {}}


@pytest.mark.parametrize(
    ("hosts", "differing", "well"),
    [
        ([WELL], 0, True),
        ([WELL, WELL | {"missing": 2}], 2, False),
        ([WELL | {"missing": 2, "stale": 1, "mended": 3}], 3, True),
        ([WELL | {"dead": 5}, WELL | {"dead": 5}], 5, False),  # both met the same
        ([WELL | {"dead": 5, "mended": 5}, WELL], 5, True),
        ([WELL | {"complete": False}], 0, False),
        ([WELL, {"host": "b", "fault": "does not answer"}], 0, False),
        ([], 0, False),
    ],
)
def test_all_is_well_when_all_was_compared_and_agrees_or_was_mended(hosts, differing, well):
    compared = Compared(hosts)
    assert (compared.differing, compared.well) == (differing, well)


def test_an_index_that_nobody_saw_is_not_said_to_be_empty():
    assert list(Compared([{"host": "a", "fault": "the index does not answer"}]).lines()) == [
        "a: the index does not answer"
    ]


def test_people_are_told_what_differs_where_and_which_hosts_are_silent():
    found = WELL | {"missing": 1, "examples": {"missing": ["ab"]}, "silent": ["c"], "complete": False}
    text = "\n".join(Compared([found, {"host": "b", "fault": "does not answer"}]).lines())
    for said in (
        "a: 10 blocks",
        "1 missing",
        "missing: ab",
        "b: does not answer",
        "not heard of lately: c",
        "--seconds",
    ):
        assert said in text
