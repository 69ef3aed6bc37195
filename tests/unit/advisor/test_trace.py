from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter

import pytest

from kvtier.advisor.trace import Request, ceiling, read_trace
from kvtier.errors import ConfigError
from tests.unit.advisor.traces import conversation

LINES = (
    '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}\n\n'
    '{"timestamp": 1500, "hash_ids": []}'
)


def test_plain_and_packed_traces_are_the_same(tmp_path):
    expected = [Request(0.0, (0, 1)), Request(1.5, ())]
    for name, pack in (("t.jsonl", bytes), ("t.jsonl.gz", gzip.compress), ("t.jsonl.xz", lzma.compress)):
        path = tmp_path / name
        path.write_bytes(pack(LINES.encode()))
        assert read_trace(path) == expected


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: Expecting property name"),
        ("[1]", "line 2: it is no JSON object"),
        ('{"timestamp": 0}', "line 2: hash_ids .* is missing"),
        ('{"hash_ids": []}', "line 2: timestamp .* is missing"),
        ('{"timestamp": "0", "hash_ids": []}', "line 2: timestamp is '0'"),
        ('{"timestamp": true, "hash_ids": []}', "line 2: timestamp is True"),
        ('{"timestamp": -1, "hash_ids": []}', "line 2: timestamp is -1"),
        ('{"timestamp": 0, "hash_ids": 7}', "line 2: hash_ids is no list of integers"),
        ('{"timestamp": 0, "hash_ids": [true]}', "line 2: hash_ids is no list of integers"),
        ('{"timestamp": 0, "hash_ids": [3, 4, 3]}', "line 2: an id is in hash_ids twice"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, line, says):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "hash_ids": [0]}) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=says):
        read_trace(path)


@pytest.mark.parametrize("name", ["t.jsonl", "t.gz", "t.xz"])
def test_what_is_no_trace_is_said(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe garbage \x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(path)


def test_an_empty_trace_is_said(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(path)


def test_the_ceiling_counts_prefixes():
    trace = [Request(0, (1, 2, 3)), Request(1, (1, 2, 4)), Request(2, (9, 3)), Request(3, ())]
    assert ceiling(trace) == 2 / 8, "3 came before, but not behind 9"
    assert ceiling([Request(0, ())]) == 0.0


def test_the_conversation_trace_is_the_one_that_it_is_said_to_be():
    trace = conversation()
    blocks = [block for request in trace for block in request.blocks]
    assert (len(trace), len(blocks)) == (12_031, 288_500)
    assert ceiling(trace) == pytest.approx(0.366, abs=0.001)
    uses = Counter(blocks)
    assert sum(count == 1 for count in uses.values()) / len(uses) == pytest.approx(0.76, abs=0.005)
