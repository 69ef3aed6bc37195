"""`kvtier replay`, with all that surrounds a setup, on several processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.advisor.sweep import FACTORS, PLANS
from tests.unit.advisor.traces import chats

KVTIER = Path(sys.executable).with_name("kvtier")


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([KVTIER, "replay", *map(str, args)], capture_output=True, text=True, check=False)


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "t.jsonl"
    lines = [json.dumps({"timestamp": 1000 * r.seconds, "hash_ids": r.blocks}) for r in chats(15)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_what_surrounds_a_setup(trace, tmp_path):
    """More memory, and smaller blocks, never find less here; the setup itself is among them."""
    done = run(trace, "--cpu", "2GiB", "--nvme", "8GiB", "--plan", "int8", "--json", "--plot", tmp_path / "p.png")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    sizes = {size["factor"]: size["hit_ratio"] for size in said["sizes"]}
    plans = {plan["plan"]: plan["hit_ratio"] for plan in said["plans"]}
    assert tuple(sizes) == FACTORS
    assert tuple(plans) == PLANS
    assert sizes[1.0] == plans["int8"] == said["outcome"]["hit_ratio"]
    assert sorted(sizes.values()) == list(sizes.values())
    assert sizes[4.0] > sizes[0.25]
    assert plans["int4"] > plans["raw"]
    assert (tmp_path / "p.png").stat().st_size > 1000


@pytest.mark.slow
def test_what_is_too_small_to_work_is_left_out(trace):
    done = run(trace, "--cpu", "140MiB", "--plan", "raw", "--json")
    assert done.returncode == 0, done.stderr
    assert [size["factor"] for size in json.loads(done.stdout)["sizes"]] == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--cpu", "much"], "'much' is no size"),
        (["--cpu", "1MiB"], "a CPU tier of 1,048,576 bytes is too small"),
        (["--policy", "lfu"], "no eviction policy 'lfu'"),
    ],
)
def test_what_is_wrong_is_one_line(trace, args, says):
    done = run(trace, *args)
    assert done.returncode == 1
    assert done.stderr.startswith("kvtier: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
