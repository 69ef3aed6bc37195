"""Each script of the tutorial runs, draws its picture, and says what its page says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kvtier.errors import ConfigError
from tests.door_fixture import ROOT

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from kvtier_services.demo import model

pytestmark = pytest.mark.slow

try:
    model.require_packages()
except ConfigError as exc:
    pytest.skip(str(exc), allow_module_level=True)


@pytest.fixture
def said(tmp_path, request):
    """What a script prints, by the beginning of each line: the numbers behind it."""
    name = request.function.__name__.removeprefix("test_")
    done = subprocess.run(
        [sys.executable, "-m", f"examples.tutorial.{name}", "--quick", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    lines = {}
    for line in done.stdout.splitlines():
        title, *cells = re.split(r"\s{2,}|: ", line.strip())
        lines[title] = [float(n.replace(",", "")) for cell in cells for n in re.findall(r"[\d,]*\.?\d+", cell)]
        lines[title] = lines[title] or cells
    return lines


@pytest.mark.parametrize("name", ["attention", "generation", "layers", "pruning", "quantisation", "sharing"])
def test_a_script_runs_by_its_path(tmp_path, name):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "tutorial" / f"{name}.py"), "--help"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout


def test_generation(said):
    """1 + 2 + ... + 100 without a cache, and 100 with; float32 of 30 layers, K and V, 3 heads of 64."""
    assert said["the same 100 tokens both ways"] == ["yes"]
    assert said["with a cache"][0] == 100
    assert said["without"][0] == 5_050
    assert said["bytes of the cache a token"] == [30 * 2 * 3 * 64 * 4]


def test_attention(said):
    top, first, others = said["all"]
    assert 50 < others <= top <= 100
    assert first > 10
    assert said["25-29"][1] > said["0-4"][1]


def test_quantisation(said):
    by_bits = [said[plan] for plan in ("int8", "int4", "int3")]
    for metric in range(1, 5):
        values = [line[metric] for line in by_bits]
        assert values == sorted(values)
        assert values[0] < values[-1]
    assert said["raw"] == [16, 0, 0, 0, 0, 100]


def test_pruning(said):
    """More budget costs less, and what attention chooses costs less than the youngest tokens."""
    h2o, snap_kv, streaming = zip(*(said[f"{tokens} of 256 tokens"] for tokens in (192, 128, 64)), strict=True)
    for costs in (h2o, snap_kv, streaming):
        assert list(costs) == sorted(costs)
    assert all(a < c and b < c for a, b, c in zip(h2o, snap_kv, streaming, strict=True))


def test_layers(said):
    for third in ("bottom", "middle", "top"):
        assert 0 < said[f"{third}, int4"][1] < said[f"{third}, int2"][1]
    assert said["layered"][0] == said["layered, raw below"][0] > said["int8"][0]
    assert said["layered"][1] > said["int8"][1]
    distances = said["a layer from the best multiple of the one below"]
    assert len(distances) == 6
    assert min(distances) > 90


def test_sharing(said):
    """256 tokens of prompt, 14 of question, 15 of the answer: 10 times, or 16 pages and 2 for each."""
    token = 46_080
    copies, pages = said["10 DynamicCaches"], said["forks in pages"]
    assert copies[0] == 10 * (256 + 14 + 15) * token
    assert pages[0] == (16 + 10 * 2) * 16 * token
    assert pages[2] < copies[2] / 2
    assert said["the same answers"][:2] == [10, 10]
    first, second = said["request 1"], said["request 2"]
    assert first[:2] == [0, 270]
    assert second[:2] == [256, 14]
    assert first[3] == second[3] == said["request 10"][3]
