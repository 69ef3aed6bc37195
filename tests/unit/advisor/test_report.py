"""What people and machines are told."""

from __future__ import annotations

import json

import pytest

from kvtier.advisor.answer import answer
from kvtier.advisor.models import spec_of
from kvtier.advisor.plot import plot
from kvtier.advisor.replay import Setup, replay
from kvtier.advisor.report import as_dict, as_text, nbytes
from kvtier.advisor.sweep import Sweep
from kvtier.advisor.trace import ceiling
from kvtier.errors import ConfigError
from tests.unit.advisor.traces import chats

SETUP = Setup(2 << 30, nvme=64 << 30, plan="int8")
TRACE = chats(8)
SPEC = spec_of(SETUP.model, 512)


@pytest.fixture(scope="module")
def found() -> Sweep:
    asked = replay(TRACE, SETUP)
    return Sweep(asked, {0.25: asked, 1.0: asked, 2.0: asked}, {"raw": asked, "int8": asked})


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [json.dumps({"timestamp": 1000 * r.seconds, "hash_ids": r.blocks}) for r in TRACE]
    path.write_text("\n".join(lines))
    return path


def test_a_page_to_read(found):
    text = as_text(SETUP, found, SPEC, 0.5)
    ratio = f"{found.asked.hit_ratio:.3f}"
    assert f"hit ratio {ratio}, of 0.500 if nothing were ever forgotten" in text
    assert "llama-3.1-8b, plan int8, 33.5 MiB a block" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["memory", "x1/4", "x1", "x2"] in lines
    assert ["cpu", "512", "MiB", "2", "GiB", "4", "GiB"] in lines
    assert ["plan", "raw", "int8"] in lines
    assert ["block", "64", "MiB", "33.5", "MiB"] in lines
    assert ["hit", "ratio", ratio, ratio, ratio] in lines
    assert "gpu" not in text
    assert f"{found.asked.write_amplification:.2f} for each byte given" in text


def test_for_machines(found):
    said = json.loads(json.dumps(as_dict(SETUP, found, SPEC, 0.5)))
    assert said["setup"]["cpu"] == 2 << 30
    assert said["outcome"]["hits"] == found.asked.hits
    assert said["outcome"]["moved_nbytes"]["cpu>nvme"] == found.asked.moved_nbytes["cpu", "nvme"]
    assert [size["factor"] for size in said["sizes"]] == [0.25, 1.0, 2.0]
    assert [(plan["plan"], plan["block_nbytes"] >> 20) for plan in said["plans"]] == [("raw", 64), ("int8", 33)]
    assert said["plans"][0]["hit_ratio"] == said["outcome"]["hit_ratio"]


def test_a_setup_alone(trace_file):
    """Not said: what surrounds it."""
    said: list[str] = []
    text = answer(trace_file, SETUP, 512, alone=True, say=said.append)
    assert f"of {ceiling(TRACE):.3f} if nothing" in text
    assert "x1/4" not in text
    assert said == ["replaying"]
    assert json.loads(answer(trace_file, SETUP, 512, alone=True, json=True))["sizes"] == []
    with pytest.raises(ConfigError, match="leave out --alone or --plot"):
        answer(trace_file, SETUP, 512, alone=True, picture=trace_file)


def test_a_picture(found, tmp_path):
    path = tmp_path / "p.png"
    plot(SETUP, found, 0.5, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    for bad in (tmp_path / "none" / "p.png", tmp_path / "p.unknown"):
        with pytest.raises(ConfigError, match="cannot be written"):
            plot(SETUP, found, 0.5, bad)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1 << 30, "1 GiB"),
        (1.5 * 2**40, "1.5 TiB"),
        (2e15, "1,819 TiB"),
    ],
)
def test_bytes(number, text):
    assert nbytes(number) == text
