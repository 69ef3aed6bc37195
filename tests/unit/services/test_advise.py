"""`kvtier advise`: options become a question, and what is wrong is one line."""

from __future__ import annotations

import json
import sys

import pytest

from kvtier.advisor.footprint import Footprint, Storage
from kvtier.advisor.models import spec_of
from kvtier_services import cli
from tests.unit.advisor.measured import strategy, table, write

GIB = 1 << 30


@pytest.fixture
def advise(monkeypatch, tmp_path, capsys):
    """Exit code, and what was said on either stream."""
    measured = write(tmp_path / "m.json")

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvtier", "advise", "--measured", str(measured), *args])
        code = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_page(advise):
    code, said, _ = advise("--memory", "24GiB", "--batch", "16", "--plan", "int4", "--keep", "70%")
    assert code == 0
    assert "32,768 tokens, 16 sequences, pages of 16 tokens" in said
    row = next(line.split() for line in said.splitlines() if line.startswith("int4, keep 70% "))
    assert row[:10] == ["int4,", "keep", "70%", "4.39", "24.6", "KiB", "787", "MiB", "12.3", "GiB"]
    assert "loses least of what fits" in said


def test_no_table_is_cut_on_a_small_terminal(advise, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, said, _ = advise("--memory", "24GiB", "--batch", "16", "--plan", "int4", "--keep", "70%")
    assert "…" not in said
    assert "63,836 tokens  30 sequences" in said


def test_every_option_for_machines(advise, tmp_path):
    picture = tmp_path / "p.png"
    options = {
        "--model": "llama-7b", "--context": "4096", "--batch": "2", "--memory": "3GiB", "--accuracy": "0.02",
        "--plan": "int8", "--keep": "1000", "--page": "32", "--plot": str(picture),
    }  # fmt: skip
    code, said, _ = advise(*(word for option in options.items() for word in option), "--json")
    assert code == 0
    answer = json.loads(said)
    asked = ("llama-7b", 4096, 2, 3 * GIB, 0.02, 32)
    names = ("model", "context", "batch", "memory", "accuracy", "page_tokens")
    assert tuple(answer[name] for name in names) == asked
    native, other, fused = answer["storage"]
    assert (native["held"], native["sequences"]) == (2 * GIB, 1)
    storage = Storage("int8", 1000, page_tokens=32)
    assert (other["name"], other["held"]) == (
        "int8, keep 1000",
        Footprint(spec_of("llama-7b", 64), storage).held(4096),
    )
    assert (fused["name"], fused["lengths"]["100000"] < 0.4 * native["lengths"]["100000"]) == ("fused (default)", True)
    assert [one["strategy"]["name"] for one in answer["recommended"]] == [
        "int8", "k8v4", "int4", "int3",
    ]  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_names_are_no_markup(advise, tmp_path):
    named = write(tmp_path / "n.json", table() | {"strategies": [strategy("[bold]8[/] :smile:", "int8")]})
    code, said, _ = advise("--measured", str(named))
    assert code == 0
    assert "[bold]8[/] :smile:  " in said


@pytest.mark.parametrize("text", ["32768", "32k", "32K", "32,768", " 32 k"])
def test_a_context_as_people_write_it(advise, text):
    assert json.loads(advise("--context", text, "--json")[1])["context"] == 32_768


def test_a_recipe_of_the_flow(advise):
    """40:48:40 of 32 layers: 10 of int4 with .6 kept, 12 of int8 with .8, 10 as they are."""
    _, said, _ = advise("--recipe", "split", "--context", "8192", "--json")
    fused = json.loads(said)["storage"][1]
    assert fused["name"] == "fused (split)"
    assert fused["kept"] == [round(0.6 * 8192)] * 10 + [round(0.8 * 8192)] * 12 + [8192] * 10
    assert fused["layers"][0] < fused["layers"][10] < fused["layers"][22] == 8192 * 4096
    _, said, _ = advise("--recipe", "int8*snap_kv(0.5)", "--json")
    fused = json.loads(said)["storage"][1]
    assert (fused["name"], fused["kept"]) == ("fused", [16_384] * 32)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--memory", "much"], "'much' is no size"),
        (["--memory", "1" + 400 * "0"], "is more than any memory"),
        (["--memory", "0"], "memory is 0"),
        (["--context", "long"], "'long' is no number of tokens"),
        (["--context", "1.5"], "'1.5' is no number of tokens"),
        (["--context", "0"], "context is 0"),
        (["--context", "9" * 400], "is no number of tokens"),
        (["--accuracy", "perfect"], "no accuracy 'perfect'"),
        (["--plan", "intt"], "no plan 'intt'"),
        (["--recipe", "int4*snap"], "no pruning policy 'snap'"),
        (["--keep", "0"], "keep is 0.0; write a share"),
        (["--model", "lama"], "no model 'lama'"),
        (["--measured", "none.json"], "none.json cannot be read"),
        (["--plot", "none/p.png"], "none/p.png cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line(advise, args, says):
    code, _, said = advise(*args)
    assert code == 1
    assert said.startswith("kvtier: ")
    assert said.count("\n") == 1
    assert says in said
