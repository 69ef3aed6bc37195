"""The table of measured strategies."""

from __future__ import annotations

import pytest

from kvtier.advisor.footprint import Footprint, Storage
from kvtier.advisor.models import spec_of
from kvtier.advisor.strategies import read_measured
from kvtier.errors import ConfigError
from kvtier.spec import KVSpec
from tests.unit.advisor.measured import by_name, read, strategy, table, write


def test_a_table(tmp_path):
    measured = read_measured(write(tmp_path / "m.json"))
    assert [one.name for one in measured.strategies][:3] == ["raw", "layered", "int8"]
    assert measured.source == "Small (q4) over 3 texts (prose, code), 256 tokens after 1,024, on 2026-11-30"
    assert measured.speed_of("int4").decode == 1.2
    assert measured.speed_of("fp8") is None
    int4 = by_name(measured, "int4")
    assert int4.loss == pytest.approx(0.00405 + 0.00173)
    assert int4.storage(32) == Storage("int4", 1.0)
    assert by_name(measured, "int4*h2o(keep=0.5)").storage(32, 64) == Storage("int4", 0.5, page_tokens=64)


def test_what_is_new_in_a_table_does_not_hinder(tmp_path):
    said = table()
    said["strategies"][0]["colour"] = "red"
    assert read_measured(write(tmp_path / "m.json", said | {"host": "h"})).format == 1


@pytest.mark.parametrize("interval", [[0.01, None], [-0.0001, 0.0]])
def test_one_text_has_no_interval_and_noise_no_sign(tmp_path, interval):
    measured = read(tmp_path / "m.json", strategy("a", "int8", kl=interval))
    assert measured.strategies[0].loss == max(0.0, interval[0])


@pytest.mark.parametrize("layers", [3, 6, 7, 2])
def test_layers_that_keep_different_shares_on_a_model_of_other_layers(tmp_path, layers):
    """A layer keeps what the layer as deep in the measured model kept."""
    measured = read(tmp_path / "m.json", strategy("a", "raw", keep=0.6, keep_layers=[0.25, 0.5, 1.0]))
    storage = measured.strategies[0].storage(layers)
    expected = tuple([0.25, 0.5, 1.0][3 * layer // layers] for layer in range(layers))
    assert storage.keep == expected
    kept = Footprint(KVSpec(layers, 1, 16, "bfloat16"), storage).kept(1000)
    assert kept == tuple(int(1000 * share) for share in expected)


def bad(**changes):
    said = table()
    strategies = changes.pop("strategies", None)
    if isinstance(strategies, dict):
        said["strategies"][4] |= strategies
        strategies = said["strategies"]
    if strategies is not None:
        said["strategies"] = strategies
    return said | changes


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (bad(format=2), "its format is 2, and this version reads 1"),
        (bad(strategies=[]), "there are no strategies in it"),
        (bad(strategies={"name": "int8"}), "there are two strategies 'int8'"),
        (bad(strategies={"plan": "intt"}), "strategy 'k8v4': no plan 'intt'"),
        (bad(strategies={"keep": 0}), r"Expected `float` > 0.0 - at `\$.strategies\[4\].keep`"),
        (bad(strategies={"keep_layers": [1.5]}), r"keep_layers"),
        (bad(strategies={"kl": [0.1]}), r"\.kl`"),
        (bad(strategies={"kl": [0.1, -0.1]}), "kl is 0.1, -0.1; it is a mean and half of its interval"),
        (bad(strategies={"kl": [-0.5, 0.1]}), "kl is -0.5; a divergence is not below 0"),
        (bad(strategies={"top1": [97.1, 0.1]}), "top1 is 97.1; it is a share, from 0 to 1"),
        (bad(context=0), r"\$.context"),
        (bad(tokens=-1), r"\$.tokens"),
        (bad(texts=[]), r"\$.texts"),
        (bad(strategies={"share": "half"}), r"Expected `float`, got `str` - at `\$.strategies"),
        (bad(speed=[{"plan": "int8"}]), "missing required field `encode`"),
        ({"format": 1}, "missing required field"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_how_to_make_one(tmp_path, said, says):
    path = write(tmp_path / "m.json", said)
    with pytest.raises(ConfigError, match=says) as caught:
        read_measured(path)
    assert str(path) in str(caught.value)
    assert "write one with: python -m benchmarks.quality --save FILE" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x81", b'{"format": 1e999}'])
def test_bytes_that_are_no_table(tmp_path, content):
    path = tmp_path / "m.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no table of measured strategies"):
        read_measured(path)


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_measured(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_measured(tmp_path)


def test_the_bytes_that_were_measured_are_those_that_are_computed():
    """Of kvtier's own table: the benchmark counted the bodies that it encoded; here layouts are added up."""
    measured = read_measured()
    spec = spec_of("smollm2-135m", 64)
    for one in measured.strategies:
        computed = Footprint(spec, one.storage(spec.layers, page_tokens=1)).share(measured.context)
        assert computed == pytest.approx(one.share, rel=0.005), one.name
    assert {"raw", "int8", "k8v4", "int4", "int3", "layered", "mixed"} <= {one.name for one in measured.strategies}
    assert all(measured.speed_of(plan) for plan in ("int8", "k8v4", "int4", "int3"))
