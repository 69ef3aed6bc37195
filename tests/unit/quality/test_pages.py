"""What is written down of a measurement: the tables of a page, and the file for `kvtier advise`."""

from __future__ import annotations

import json

import pytest

from benchmarks.quality.frontier import best, crossing
from benchmarks.quality.loss import Loss
from benchmarks.quality.measure import Once, Result
from benchmarks.quality.pages import check, rewrite
from benchmarks.quality.save import save
from benchmarks.quality.speed import Speed
from benchmarks.quality.strategies import CONTROLS, PLANS, PRUNED, parse
from benchmarks.quality.texts import texts
from benchmarks.quality.unusable import Unusable

KINDS = ("prose", "code")
SPEEDS = [Speed("int4", 0.5, 1.9, 414720)]


def result(text, group, keep, bits, kls):
    policy = None if group == PLANS else "prune/1(...)"
    once = tuple(Once((keep, keep), bits, Loss(kl, -kl, 1 - kl)) for kl in kls)
    return Result(parse(text, group), "canonical", policy, 16, once, KINDS)


RESULTS = [
    result("int4", PLANS, 1.0, 4.5, (0.003, 0.005)),
    result("int8", PLANS, 1.0, 8.5, (0.00002, 0.00002)),
    result("int4*snap_kv(keep=0.5)", PRUNED, 0.5, 4.5, (0.02, 0.03)),
    result("h2o(keep=0.5)", PRUNED, 0.5, 16.0, (0.02, 0.03)),
    result("streaming_llm(sinks=0, recent=512)", CONTROLS, 0.5, 16.0, (0.8, 0.9)),
]
PAGE = """before
<!-- measured: plans -->
old
<!-- end -->
between
<!-- measured: controls -->
<!-- end -->
after
"""


def test_tables_stand_between_their_markers_and_nothing_else_changes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    rewrite(page, RESULTS, SPEEDS)
    first = page.read_text()
    assert "old" not in first
    lines = first.splitlines()
    assert [line for line in lines if not line.startswith(("|", "<!--"))] == ["before", "between", "after"]
    # The mean of .003 and .005, and 12.706 standard errors of .001: Student's t with one degree of freedom.
    assert "| `int4` | 4.50 | 0.00400 ± 0.01271 | -0.0040 ± 0.0127 | 99.6% ± 1.3% |" in lines
    assert "| `streaming_llm(sinks=0, recent=512)` | 50% | 50.0% | 0.85000 ± 0.63530" in first
    rewrite(page, RESULTS, SPEEDS)
    assert page.read_text() == first


@pytest.mark.parametrize("text", ["no markers", "<!-- measured: plants -->\n<!-- end -->\n"])
def test_a_page_without_known_markers_is_refused(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(Unusable, match="controls"):
        check(page)
    with pytest.raises(Unusable, match="pass a page that exists"):
        check(tmp_path / "none.md")


def test_the_file_has_what_was_measured_and_nothing_that_is_wrong_on_purpose(tmp_path):
    file = tmp_path / "folder" / "measured.json"
    save(file, RESULTS, SPEEDS, texts()[:2], model="a model", context=1024, tokens=256)
    found = json.loads(file.read_text())
    assert (found["format"], found["model"], found["context"], found["tokens"]) == (1, "a model", 1024, 256)
    assert [text["name"] for text in found["texts"]] == [text.name for text in texts()[:2]]
    assert [one["name"] for one in found["strategies"]] == [one.name for one in RESULTS[:-1]]
    both = found["strategies"][2]
    assert (both["plan"], both["preset"], both["policy"]) == ("int4", "snap_kv(keep=0.5)", "prune/1(...)")
    # Half of the tokens in 4.5 of 16 bits.
    assert (both["keep"], both["bits"], both["share"]) == (0.5, 4.5, 0.1406)
    assert both["kl"] == [0.025, 0.06353]
    assert found["strategies"][0]["preset"] is None
    assert found["speed"][0] | {"what": ""} == {
        "plan": "int4",
        "encode": 0.5,
        "decode": 1.9,
        "block_nbytes": 414720,
        "what": "",
    }


def test_layers_that_keep_different_shares_are_told_apart(tmp_path):
    """Each layer's mean over the texts; the bytes are of what is left of all of them."""
    once = (Once((0.5, 1.0), 8.0, Loss(0.1, 0.0, 1.0)), Once((0.7, 1.0), 8.0, Loss(0.1, 0.0, 1.0)))
    one = Result(parse("split", PRUNED), "canonical", "prune/1(...)", 16, once, KINDS)
    save(tmp_path / "m.json", [one], [], texts()[:2], model="m", context=64, tokens=8)
    found = json.loads((tmp_path / "m.json").read_text())["strategies"][0]
    assert (found["keep"], found["keep_layers"], found["share"]) == (0.8, [0.6, 1.0], 0.4)
    assert (found["plan"], found["name"]) == ("layers(0-40/128:int4;40/128-88/128:int8;88/128-1:raw)", "split")


def test_one_text_has_no_interval(tmp_path):
    one = Result(
        parse("int4", PLANS), "canonical", None, 16, (Once((1.0, 1.0), 4.5, Loss(0.003, 0.0, 1.0)),), ("prose",)
    )
    save(tmp_path / "m.json", [one], [], texts()[:1], model="m", context=64, tokens=8)
    assert json.loads((tmp_path / "m.json").read_text())["strategies"][0]["kl"] == [0.003, None]


def test_what_is_best_for_how_few_bytes_is_what_was_measured():
    found = best(RESULTS, 2)
    # Within half of the bytes: of the plans int4 alone (int8 takes 8.5 of 16 bits), and one pruning each way.
    assert [one.name for one in found.values()] == ["int4", "h2o(keep=0.5)", "int4*snap_kv(keep=0.5)"]
    assert [one and one.name for one in best(RESULTS, 7).values()] == [None, None, "int4*snap_kv(keep=0.5)"]
    # int4 is the smallest plan, 16 / 4.5 times smaller, and what is pruned and no larger loses more.
    assert crossing(RESULTS[:4]) == pytest.approx(16 / 4.5)
    better = result("int2/token/sym", PLANS, 1.0, 2.0, (0.01, 0.01))
    assert crossing([*RESULTS[:4], better]) == 8
    worse = result("int2/token/sym", PLANS, 1.0, 2.3, (0.1, 0.1))
    assert crossing([*RESULTS[:4], worse]) == pytest.approx(16 / 4.5), "half of the tokens in int4 are less, and better"
