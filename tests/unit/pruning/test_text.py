"""Policies as text: what is written is what is meant, and what is not is told what to write."""

import pytest

from kvtier.errors import ConfigError
from kvtier.pruning import (
    ByHead,
    KeyNorm,
    Length,
    Mass,
    Policy,
    Pyramid,
    Ratio,
    Recency,
    Threshold,
    Window,
    attention_threshold,
    h2o,
    parse_policy,
    pyramid_kv,
    snap_kv,
    streaming_llm,
)

POLICIES = [
    h2o(),
    h2o(1024, every=7),
    streaming_llm(2, 100, compact=True),
    snap_kv(0.6, window=16, kernel=5),
    pyramid_kv(0.5, beta=4),
    attention_threshold(),
    Policy(Mass(), ByHead(Pyramid(Length(24), 4), 0.3), recent=4, whole=0),
    Policy(Window(8, 3, "mean"), ByHead(Ratio(1 / 3)), sinks=0),
    Policy(KeyNorm(), Length(9)),
    Policy(Mass(mean=True), Threshold(1e-5)),
    Policy(Recency(), Pyramid(Ratio(0.25)), recent_share=0.1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_what_a_policy_says_of_itself_is_that_policy(policy):
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("snap_kv", snap_kv()),
        (" snap_kv( keep = 0.6, window=16 ) ", snap_kv(0.6, window=16)),
        ("h2o(1024)", h2o(1024)),
        ("streaming_llm(4, recent=64, compact=True)", streaming_llm(4, 64, compact=True)),
        ("attention_threshold(1e-4, every=50)", attention_threshold(1e-4, every=50)),
    ],
)
def test_presets_are_written_as_they_are_called(text, policy):
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("snapkv(0.5)", "did you mean snap_kv"),
        ("", "Presets: "),
        ("snap_kv(0.5", "write it as snap_kv"),
        ("snap_kv(keep='much')", "'much' is no number"),
        ("snap_kv(__import__('os'))", "cannot be read"),
        ("snap_kv(0.5).scorer", "write it as snap_kv"),
        ("h2o(keeps=0.5)", "keeps"),
        ("snap_kv(2.5)", "share above 0"),
        ("snap_kv(0.5)" + " " * 2000 + "+1", "too long"),
        ("prune/1(mass,sinks:0,recent:0/0.0,every:1,whole:0,positions:kept)", "no budget"),
        ("prune/1(mess*ratio:0.7,sinks:0,recent:0/0.0,every:1,whole:0,positions:kept)", "no scorer 'mess'"),
        ("prune/1(mass*rate:0.7,sinks:0,recent:0/0.0,every:1,whole:0,positions:kept)", "no budget 'rate:0.7'"),
        ("prune/1(mass*ratio:x,sinks:0,recent:0/0.0,every:1,whole:0,positions:kept)", "'x' is no number"),
        (
            "prune/1(mass*pyramid:2(threshold:0.1),sinks:0,recent:0/0.0,every:1,whole:0,positions:kept)",
            "another budget",
        ),
        ("prune/1(mass*length:1.5,sinks:0,recent:0/0.0,every:1,whole:0,positions:kept)", "number of tokens"),
    ],
)
def test_what_cannot_be_read_is_refused(text, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(").replace(")", r"\)")):
        parse_policy(text)
