"""Laws of the recommender, and what it says of a table whose figures are known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.advisor.footprint import Footprint, Storage
from kvtier.advisor.recommend import ACCURACY, bound_of, nats, recommend
from kvtier.advisor.strategies import Measured, Strategy, Text, read_measured
from kvtier.errors import ConfigError
from kvtier.spec import KVSpec
from tests.unit.advisor.measured import read, strategy, write

GIB = 1 << 30
SPEC = KVSpec(4, 2, 32, "bfloat16")


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Measured:
    return read_measured(write(tmp_path_factory.mktemp("m") / "m.json"))


def names(verdicts) -> list[str]:
    return [verdict.candidate.strategy.name for verdict in verdicts]


def why(advice, name: str) -> tuple[str, str]:
    return next((v.why, v.reason) for v in advice.ruled_out if v.candidate.strategy.name == name)


def test_by_memory(measured):
    """32,768 tokens of llama-3.1-8b: 4 GiB native, 2.1 int8, 1.6 k8v4, 1.1 int4."""
    roomy = recommend(32_768, 5 * GIB, "good", measured=measured)
    assert names(roomy.ranked) == ["raw", "int8", "k8v4", "int4"]
    assert roomy.ranked[0].reason == "loses least of what fits: KL up to 0.00000"
    assert roomy.ranked[1].reason == "48 % less memory than the first: KL up to 0.00003"
    assert why(roomy, "fp8") == ("dominated", "k8v4 loses no more and takes no more")
    assert why(roomy, "layered") == ("dominated", "int8 loses no more and takes no more")
    assert why(roomy, "int3") == ("loss", "KL up to 0.014, and 0.01 is allowed")
    tight = recommend(32_768, 1_300 << 20, "good", measured=measured)
    assert names(tight.ranked) == ["int4"]
    assert why(tight, "raw") == ("memory", "needs 4 GiB, and there is 1.27 GiB")
    assert why(tight, "h2o(keep=0.5)") == (
        "memory",
        "needs 2.01 GiB, and there is 1.27 GiB; KL up to 0.018, and 0.01 is allowed",
    )


def test_by_accuracy(measured):
    ask = {accuracy: names(recommend(32_768, 3 * GIB, accuracy, measured=measured).ranked) for accuracy in ACCURACY}
    assert ask["exact"] == []
    assert ask["high"] == ["int8", "k8v4"]
    assert ask["good"] == ["int8", "k8v4", "int4"]
    assert ask["low"] == ["int8", "k8v4", "int4", "int3", "int4*h2o(keep=0.5)", "int4*snap_kv(keep=0.25)"]
    assert names(recommend(32_768, 5 * GIB, "exact", measured=measured).ranked) == ["raw"]


def test_a_batch_needs_its_memory(measured):
    one = recommend(4096, 5 * GIB, measured=measured, model="llama-7b").ranked[0].candidate
    eight = recommend(4096, 5 * GIB, measured=measured, model="llama-7b", batch=8)
    assert (one.strategy.name, one.nbytes) == ("raw", 2 * GIB)
    assert names(eight.ranked) == ["int4"]
    assert eight.ranked[0].candidate.nbytes == 8 * Footprint(_llama(), Storage("int4")).most(4096)


def _llama() -> KVSpec:
    return KVSpec(32, 32, 128, "bfloat16")


def test_a_prompt_that_does_not_fit_while_it_is_computed_says_so(measured):
    """4 GiB native; 15 sequences in int4 beside it are 20.5: more than the 20 that 16 of them fit in."""
    one, many = recommend(32_768, 2 * GIB, measured=measured), recommend(32_768, 20 * GIB, measured=measured, batch=16)
    most = Footprint(KVSpec(32, 8, 128, "bfloat16"), Storage("int4")).most(32_768)
    assert [one.ranked[0].candidate.prompt, many.ranked[0].candidate.prompt] == [4 * GIB, 4 * GIB + 15 * most]
    assert one.ranked[0].reason.endswith("; 4 GiB while a prompt that long is computed")
    assert many.ranked[0].reason.endswith("; 20.5 GiB while a prompt that long is computed")
    assert "prompt" not in recommend(32_768, 21 * GIB, measured=measured, batch=16).ranked[0].reason
    assert "prompt" not in recommend(32_768, None, measured=measured).ranked[-1].reason


def test_losses_of_k_and_v_are_no_losses_of_a_latent(measured):
    ranked = recommend(4096, None, model="deepseek-v3", measured=measured).ranked
    assert names(ranked)[:2] == ["raw", "int8"]
    latent = "measured on K and V of heads, not on a latent"
    assert [latent in verdict.candidate.cautions for verdict in ranked] == [False] + [True] * (len(ranked) - 1)
    assert not any(latent in verdict.reason for verdict in recommend(4096, None, measured=measured).ranked)


def test_a_plan_that_does_not_suit_the_model_is_said_with_its_strategy(tmp_path):
    known = read(tmp_path / "m.json", strategy("two halves", "layers(0-11:int4;12-23:int8)"))
    with pytest.raises(ConfigError, match=r"strategy 'two halves' does not suit this model: .*layer 24 has no plan"):
        recommend(4096, None, measured=known)


def test_nothing_fits_and_is_accurate_enough(measured):
    advice = recommend(32_768, 1_300 << 20, "high", measured=measured)
    assert not advice.ranked
    accurate, fits = advice.nearest
    longest = Footprint(KVSpec(32, 8, 128, "bfloat16"), Storage("k8v4")).longest(1_300 << 20)
    assert accurate == f"k8v4 is accurate enough and needs 1.58 GiB: give it that, or at most {longest:,} tokens"
    assert fits == "int4 fits, and its KL is up to 0.0058: allow that as accuracy"
    tiny = recommend(32_768, 1 << 20, "high", measured=measured)
    assert tiny.nearest[0].endswith("1.58 GiB: give it that"), "a page of 16 tokens alone is 2 MiB"
    batch = recommend(32_768, 4 * GIB, "high", measured=measured, batch=5)
    assert batch.nearest[0].endswith(" tokens, or at most 2 sequences")
    assert tiny.nearest[1].startswith("nothing that was measured fits; the smallest, int4*snap_kv(keep=0.25), needs")


def test_nothing_is_accurate_enough(tmp_path):
    known = read(
        tmp_path / "m.json", strategy("int4", "int4", kl=[0.004, 0.001]), strategy("int3", "int3", kl=[0.01, 0.0])
    )
    advice = recommend(1000, GIB, "high", measured=known)
    assert advice.nearest[0] == "nothing that was measured loses so little; int4 loses least, KL up to 0.005"
    assert advice.nearest[1] == "int4 fits, and its KL is up to 0.005: allow that as accuracy"
    assert recommend(1000, None, "high", measured=known).nearest == advice.nearest


def test_what_may_lose_more_than_was_measured_says_so(tmp_path):
    """K per token, and a window that was a greater part of the measured context."""
    known = read(
        tmp_path / "m.json",
        strategy("token", "int8/token/sym", kl=[0.001, 0.0]),
        strategy("mixed", "mixed", kl=[0.002, 0.0]),
    )
    reasons = [verdict.reason for verdict in recommend(64_000, None, measured=known).ranked]
    assert reasons[0] == "loses least of what fits: KL up to 0.001; K per token breaks some models, measure yours"
    assert reasons[1].endswith(": KL up to 0.002; measured with 128 of 1,024 tokens as they are")
    short = recommend(1024, None, measured=known).ranked
    assert [verdict.candidate.strategy.name for verdict in short] == ["mixed", "token"]
    assert short[0].candidate.cautions == ()


def test_what_may_lose_more_comes_last_and_rules_out_nothing_else(tmp_path):
    """`mixed` has fewer bytes and a smaller KL than `int8`, but not of this context; of 1,024 tokens it has."""
    known = read(
        tmp_path / "m.json",
        strategy("mixed", "mixed", kl=[0.001, 0.0]),
        strategy("int8", "int8", kl=[0.002, 0.0]),
        strategy("layered", "layered", kl=[0.003, 0.0]),
    )
    advice = recommend(64_000, None, measured=known)
    assert names(advice.ranked) == ["int8", "mixed"]
    assert advice.ranked[0].reason == "loses least of what fits and needs no caution: KL up to 0.002"
    assert why(advice, "layered") == ("dominated", "int8 loses no more and takes no more")
    assert names(recommend(1024, None, measured=known).ranked) == ["mixed"]


def test_ties_go_to_fewer_bytes_then_to_speed(tmp_path):
    """0.00101 and 0.00104 are the same to two digits; of the same bytes and loss the faster one stays."""
    known = read(
        tmp_path / "m.json",
        strategy("slow", "int3", kl=[0.00104, 0.0]),
        strategy("a", "int8", kl=[0.00101, 0.0]),
        strategy("b", "int4", kl=[0.00104, 0.0]),
        strategy("also b", "K=int4/channel:64/asym,V=int4/token/asym", kl=[0.00104, 0.0]),
    )
    advice = recommend(64_000, None, measured=known)
    assert names(advice.ranked) == ["slow", "a"]
    assert why(advice, "b") == ("dominated", "slow loses no more and takes no more")
    twins = read(
        tmp_path / "m.json",
        strategy("unknown", "K=int8/channel:64/asym,V=int8/token/asym", kl=[0.001, 0.0]),
        strategy("fast", "int8", kl=[0.001, 0.0]),
    )
    advice = recommend(64_000, None, measured=twins)
    assert names(advice.ranked) == ["fast"]
    assert why(advice, "unknown") == ("dominated", "fast costs the same, and is faster")


plans = st.sampled_from(["raw", "int8", "k8v4", "int4", "int3", "layered", "mixed", "int8/token/sym"])
losses = st.sampled_from([0.0, 0.0002, 0.00021, 0.004, 0.0041, 0.05]) | st.floats(0, 0.2)


@st.composite
def tables(draw) -> Measured:
    made = [
        Strategy(
            str(number), draw(plans), "", None, None, draw(st.sampled_from([0.25, 0.5, 1.0])), 16.0, 1.0,
            (draw(losses), 0.0), (0.0, None), (1.0, None),
        )
        for number in range(draw(st.integers(1, 12)))
    ]  # fmt: skip
    return Measured(1, "m", "d", 1024, 256, [Text("a", "prose")], made, [])


@settings(deadline=None, max_examples=150)
@given(
    tables(), st.integers(1, 1 << 22), st.integers(0, 1 << 22), losses, losses, st.integers(1, 3000), st.integers(1, 4)
)
def test_laws(known, memory, more, bound, slack, max_len, batch):
    ask = {"model": SPEC, "batch": batch, "measured": known}
    advice = recommend(max_len, memory, bound, **ask)
    for verdict in advice.ranked:
        one = verdict.candidate
        footprint = Footprint(SPEC, one.strategy.storage(SPEC.layers))
        assert one.nbytes == batch * footprint.most(max_len) <= memory, "it does not fit"
        assert one.strategy.kl[0] <= bound, "it loses more than allowed"
        assert one.longest is None or one.longest >= max_len
    assert sorted(names(advice.ranked) + names(advice.ruled_out)) == sorted(one.name for one in known.strategies)
    assert [v.candidate.rank for v in advice.ranked] == sorted(v.candidate.rank for v in advice.ranked)
    for verdict in advice.ruled_out:
        one = verdict.candidate
        if verdict.why == "dominated":
            assert any(
                other.candidate.loss <= one.loss and other.candidate.nbytes <= one.nbytes for other in advice.ranked
            )
        else:
            assert one.nbytes > memory or one.loss > bound
    assert bool(advice.nearest) == (not advice.ranked)
    for other in (
        recommend(max_len, memory + more, bound, **ask),
        recommend(max_len, None, bound, **ask),
        recommend(max_len, memory, bound + slack, **ask),
    ):
        assert set(names(advice.ranked)) <= set(names(other.ranked)), "more was allowed, and something left"


@given(st.floats(0, 5))
def test_whoever_allows_what_is_said_allows_it(kl):
    assert float(nats(kl)) >= kl - 1e-9
    assert float(nats(kl)) <= max(kl * 1.1, kl + 1e-5)


def test_accuracy_in_words_and_numbers():
    assert [bound_of(word) for word in ("exact", "high", "good", "low")] == [0.0, 0.001, 0.01, 0.1]
    assert bound_of("0.005") == bound_of(0.005) == 0.005
    for wrong, says in (
        ("god", "did you mean 'good'"),
        (-1.0, "0 or more"),
        ("nan", "0 or more"),
        ("inf", "0 or more"),
    ):
        with pytest.raises(ConfigError, match=says):
            bound_of(wrong)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, GIB), "max_len is 0"),
        ((1, 0), "memory is 0"),
        ((10**400, GIB), "must be 1,099,511,627,776 or less"),
        ((1, GIB, "fine"), "no accuracy 'fine'"),
    ],
)
def test_what_cannot_be_asked(measured, arguments, says):
    with pytest.raises(ConfigError, match=says):
        recommend(*arguments, measured=measured)
    with pytest.raises(ConfigError, match="batch is 0"):
        recommend(1, GIB, batch=0, measured=measured)
