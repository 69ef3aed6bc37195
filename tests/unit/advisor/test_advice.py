"""A question about memory, and what people and machines are told."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.advisor.advice import LENGTHS, Answer, Question, advise, as_dict
from kvtier.advisor.footprint import Footprint, Storage
from kvtier.advisor.page import WIDTH, page_of
from kvtier.advisor.pictures import draw, shown
from kvtier.errors import ConfigError, UnsupportedKV
from kvtier.pruning import pyramid_kv
from tests.unit.advisor.measured import table, write

GIB = 1 << 30
SPLIT = Storage("layered", (0.6,) * 10 + (0.8,) * 12 + (1.0,) * 10)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("m") / "m.json")


def ask(measured: Path, **rest) -> Answer:
    return advise(replace(Question("llama-3.1-8b", measured=measured), **rest))


def text(answer: Answer) -> str:
    console = Console(width=WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(page_of(answer))
    return captured.get()


def row(said: str, name: str) -> list[str]:
    return next(line for line in said.splitlines() if line.startswith(name)).removeprefix(name).split()


def test_native_against_another_at_three_lengths(measured):
    answer = ask(measured, storages=(("split", SPLIT),))
    native, split = answer.rows
    assert LENGTHS == (1_000, 10_000, 100_000)
    # 128 KiB a token, in pages of 16 tokens
    assert native.lengths == tuple((128 << 10) * tokens for tokens in (1008, 10_000, 100_000))
    assert split.lengths == tuple(Footprint(answer.spec, SPLIT).held(length) for length in LENGTHS)
    # (10 layers of .6 x 4.4 bits, 12 of .8 x 8.4, 10 of 16) of 32 of 16: about half
    assert split.share == pytest.approx((10 * 0.6 * 4.375 + 12 * 0.8 * 8.375 + 10 * 16) / (32 * 16), abs=0.001)


def test_a_page_to_read(measured):
    said = text(ask(measured, memory=24 * GIB, batch=16, storages=(("int4, keep 0.7", Storage("int4", 0.7)),)))
    assert "llama-3.1-8b: 32 layers, 8 KV heads of 128, bfloat16: 128 KiB a token, 4 KiB of it in each layer" in said
    assert "32,768 tokens, 16 sequences, pages of 16 tokens" in said
    native = "16.00 128 KiB 4 GiB 64 GiB 126 MiB 1.22 GiB 12.2 GiB 12,288 tokens 6 sequences"
    assert row(said, "native") == native.split()
    assert row(said, "int4, keep 0.7")[:7] == ["4.39", "24.6", "KiB", "787", "MiB", "12.3", "GiB"]
    assert "A prompt of that length takes 4 GiB while it is computed, and then what its row says." in said
    taken = "int4  17.6 GiB       27 %  0.00405 ± 0.00173    97.8 ± 0.2 %    1.20  loses least of what fits"
    assert taken in said
    assert "6 ruled out, too large; k8v4: needs 25.3 GiB, and there is 24 GiB" in said
    assert "4 ruled out, loss too great; int3: KL up to 0.014, and 0.01 is allowed" in said
    assert "Loss is that of Small (q4) over 3 texts (prose, code), 256 tokens after 1,024, on 2026-11-30" in said
    assert "--measured FILE" in said


def test_without_memory_everything_accurate_enough_is_shown(measured):
    said = text(ask(measured, context=4096))
    assert row(said, "native") == ["16.00", "128", "KiB", "512", "MiB", "126", "MiB", "1.22", "GiB", "12.2", "GiB"]
    for plan, share in {"raw": "100", "int8": "52", "k8v4": "39", "int4": "27"}.items():
        assert row(said, f"{plan} ")[2:4] == [share, "%"]
    assert "2 ruled out, no better than another; fp8: k8v4 loses no more and takes no more" in said


def test_a_prompt_that_does_not_fit_is_said(measured):
    said = text(ask(measured, memory=2 * GIB))
    assert "takes 4 GiB while it is computed, and there is 2 GiB: what fits is for sequences that grow to it." in said
    assert "while it is computed" not in text(ask(measured, memory=4 * GIB)), "nothing but native is shown"


def test_one_of_something(measured):
    assert "1 token, 1 sequence, pages of 1 token\n" in text(ask(measured, context=1, page_tokens=1))


def test_no_column_of_speeds_without_any(tmp_path, measured):
    assert "decode" in text(ask(measured))
    assert "ecode" not in text(ask(write(tmp_path / "m.json", table() | {"speed": []})))


def test_when_nothing_fits_it_says_what_to_change(measured):
    said = text(ask(measured, memory=1_300 << 20, accuracy="high"))
    assert "Nothing that was measured fits and is accurate enough:" in said
    assert "  k8v4 is accurate enough and needs 1.58 GiB: give it that, or at most " in said
    assert "  int4 fits, and its KL is up to 0.0058: allow that as accuracy" in said


def test_more_than_is_shown(tmp_path):
    said = table()
    said["strategies"] = [
        said["strategies"][0] | {"name": str(keep), "keep": keep, "kl": [0.1 - keep / 10, 0]}
        for keep in (0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999)
    ]
    assert "2 more: --json has them" in text(ask(write(tmp_path / "m.json", said)))


def test_other_shapes(measured):
    assert "61 layers, a latent of 576, bfloat16: 68.6 KiB a token" in text(ask(measured, model="deepseek-v3"))
    assert "18 layers, 1 KV head of 256" in text(ask(measured, model="gemma-2b"))
    assert "any length" in text(ask(measured, memory=GIB, storages=(("window", Storage(keep=512)),)))


def test_for_machines(measured):
    answer = ask(measured, memory=24 * GIB, batch=16, storages=(("split", SPLIT),))
    said = json.loads(json.dumps(as_dict(answer)))
    assert (said["model"], said["batch"], said["memory"], said["accuracy"]) == ("llama-3.1-8b", 16, 24 * GIB, 0.01)
    native, split = said["storage"]
    assert (native["held"], native["batch"], native["longest"], native["sequences"]) == (4 * GIB, 64 * GIB, 12_288, 6)
    assert native["layers"] == [4 * GIB // 32] * 32
    assert sum(split["layers"]) == split["held"]
    assert split["kept"][0] == round(0.6 * 32_768)
    assert split["lengths"]["1000"] == answer.rows[1].lengths[0]
    assert [one["strategy"]["name"] for one in said["recommended"]] == ["int4"]
    assert said["recommended"][0]["nbytes"] == answer.advice.ranked[0].candidate.nbytes
    assert said["recommended"][0]["strategy"]["kl"] == [0.00405, 0.00173]
    assert {one["why"] for one in said["ruled_out"]} == {"memory", "loss"}
    assert said["measured"]["model"] == "Small (q4)"
    assert said["measured"]["speed"][1]["decode"] == 1.6
    assert said["nearest"] == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "lama"}, "no model 'lama'"),
        ({"context": 0}, "context is 0 and batch 1"),
        ({"batch": -1}, "batch -1"),
        ({"page_tokens": 10**400}, "it is a number of tokens, 1 to 1,099,511,627,776"),
        ({"batch": 10**400}, "and as many sequences"),
        ({"context": 10**400}, "write 1 to 1,099,511,627,776 tokens"),
        ({"memory": 0}, "memory is 0"),
        ({"accuracy": "fine"}, "no accuracy 'fine'"),
        ({"page_tokens": 0}, "Storage.page_tokens is 0"),
        ({"storages": (("split", SPLIT),), "model": "gpt2"}, "what 32 layers keep; the model has 12"),
    ],
)
def test_what_cannot_be_asked_is_said(measured, changes, says):
    with pytest.raises(ConfigError, match=says):
        ask(measured, **changes)


def test_a_model_that_drops_kv_by_itself_is_refused(measured, tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512, "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedKV, match="sliding window"):
        ask(measured, model=str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {
            "memory": 24 * GIB,
            "batch": 16,
            "storages": (("split", SPLIT), ("pyramid", Storage("int4", pyramid_kv(0.5)))),
        },
        {"accuracy": "exact"},
        {"model": "deepseek-v3"},
        {"memory": 1 << 20},
    ],
)
def test_a_picture(measured, tmp_path, changes):
    path = tmp_path / "p.png"
    draw(ask(measured, **changes), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    for bad in (tmp_path / "none" / "p.png", tmp_path / "p.unknown"):
        with pytest.raises(ConfigError, match="cannot be written"):
            draw(ask(measured), bad)


def test_without_matplotlib_it_says_what_to_install(measured, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvtier\[plot\]'"):
        draw(ask(measured), tmp_path / "p.png")


def test_whose_layers_are_drawn(measured):
    asked = ask(measured, memory=GIB * 3 // 2, storages=(("split", SPLIT),))
    assert shown(asked)[0] == "split"
    name, footprint = shown(advise(replace(asked.question, storages=())))
    assert (name, footprint.storage) == ("int4", Storage("int4"))
    assert shown(ask(measured, memory=1))[0] == "native"
