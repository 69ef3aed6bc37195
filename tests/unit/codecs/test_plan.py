"""What people write, and the one text that keys and headers carry. The texts are read from `plan`'s grammar by hand."""

import pytest

from kvtier.codecs.plan import NAMED, canonical_plan, parse_plan, resolve
from kvtier.errors import ConfigError
from kvtier.spec import KVSpec

SPEC = KVSpec(32, 8, 128, "bfloat16")
LATENT = KVSpec(27, 1, 576, "bfloat16", mla=True)
PLANS = [name for name in NAMED if name != "mixed"]
INT4 = "sinks:1(K=int4/channel:64/asym,V=int4/token/asym)"


def canonical(text: str, spec: KVSpec = SPEC) -> str:
    return canonical_plan(text, spec)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raw", "raw"),
        ("int8", "K=int8/channel:64/asym,V=int8/token/asym"),
        ("k8v4", "sinks:1(K=int8/channel:64/asym,V=int4/token/sym/hadamard/lloyd)"),
        ("int4", "sinks:1(K=int4/channel:64/asym,V=int4/token/asym)"),
        ("int3", "sinks:1(K=int4/channel:64/asym,V=int2/token/sym/hadamard/lloyd)"),
        ("fp8", "K=e4m3/channel:64/asym,V=e4m3/token/sym"),
        # 5/16 and 11/16 of 32 layers are 10 and 22
        (
            "layered",
            "layers(0-9:sinks:1(K=int4/channel:64/asym,V=int4/token/asym);"
            "10-21:K=int8/channel:64/asym,V=int8/token/asym;22-31:raw)",
        ),
    ],
)
def test_names_never_change_what_they_mean(name: str, text: str) -> None:
    """Keys are derived from these: another text is another keyspace, and what is stored under the old one is lost."""
    assert canonical(name) == text


def test_every_name_but_that_of_private_caches_is_a_plan_for_blocks() -> None:
    for name in PLANS:
        assert canonical(name)
    with pytest.raises(ConfigError, match=r"blocks are shared and have no age. Use sinks:1\(K=int4"):
        canonical("mixed")


@pytest.mark.parametrize("layers", [1, 16, 24, 30, 32])
def test_fractions_cover_every_layer_exactly_once(layers: int) -> None:
    thirds = canonical(
        "layers(0-1/3:int8/token/sym;1/3-2/3:int4/token/sym;2/3-1:raw)", KVSpec(layers, 1, 64, "float32")
    )
    sevenths = ";".join(f"{i}/7-{i + 1}/7:{'raw' if i % 2 else 'fp16'}" for i in range(7))
    assert thirds
    for text in ("layered", f"layers({sevenths})"):
        assert len(resolve(parse_plan(text), KVSpec(layers, 1, 64, "float32"))) == layers


def test_fractions_are_rounded_to_the_nearest_layer() -> None:
    # 5/16 and 11/16 of 30 layers are 9.375 and 20.625: layers 0 to 8, 9 to 20, 21 to 29
    text = canonical("layered", KVSpec(30, 8, 128, "bfloat16"))
    assert text.startswith("layers(0-8:sinks")
    assert ";9-20:K=int8" in text
    assert text.endswith(";21-29:raw)")
    # of 24: 7.5, which rounds up, and 16.5
    text = canonical("layered", KVSpec(24, 8, 128, "bfloat16"))
    assert text.startswith("layers(0-7:sinks")
    assert ";8-16:K=int8" in text
    # of 1: 0.3125 and 0.6875: only the middle has a layer
    assert canonical("layered", KVSpec(1, 8, 128, "bfloat16")) == canonical("int8")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (" int4 ", "int4"),
        ("sinks:1( int4/token/sym )", "sinks:1(int4/token/sym)"),
        ("K=int4/token/sym,V=int4/token/sym", "int4/token/sym"),
        ("K=int4/token/sym , V= raw", "K=int4/token/sym,V=raw"),
        ("K=raw,V=raw", "raw"),
        ("bf16", "raw"),
        ("sinks:5(bf16)", "raw"),
        ("K=bf16,V=fp16", "K=raw,V=fp16"),
        ("sinks:1(K=raw,V=fp16)", "sinks:1(K=raw,V=fp16)"),
        ("layers(0-31:int8)", "int8"),
        ("layers(0:raw;1-31:raw)", "raw"),
        ("layers(2-31:raw;0-1:fp16)", "layers(0-1:fp16;2-31:raw)"),
        ("layers(0-1/2:raw;1/2-1:fp16)", "layers(0-15:raw;16-31:fp16)"),
        ("layers(0:sinks:2(fp16);1-31:fp16)", "layers(0:sinks:2(fp16);1-31:fp16)"),
        ("sinks:2(layers(0:raw;1-31:fp16))", "layers(0:raw;1-31:sinks:2(fp16))"),
        ("int8/channel/asym", "int8/channel:64/asym"),
        ("int8/group:128/sym", "int8/token/sym"),
        ("int8/group:999/sym", "int8/token/sym"),
        ("int8/group:127/sym", "int8/group:127/sym"),
    ],
)
def test_what_means_the_same_has_one_text(text: str, same: str) -> None:
    assert canonical(text) == canonical(same)
    assert same in NAMED or canonical(text) == same


def test_nothing_to_rotate_is_no_rotation() -> None:
    odd = KVSpec(2, 2, 33, "bfloat16", v_head_dim=64)
    assert canonical("int8/token/sym/hadamard", odd) == "K=int8/token/sym,V=int8/token/sym/hadamard"
    # with levels for normal values the text needs the word
    assert canonical("int4/token/sym/hadamard/lloyd", odd) == "int4/token/sym/hadamard/lloyd"


def test_16_bits_of_the_kvs_own_kind_are_the_kv_as_it_is() -> None:
    for dtype, kinds in (("bfloat16", ("raw", "fp16")), ("float16", ("bf16", "raw")), ("float32", ("bf16", "fp16"))):
        spec = KVSpec(2, 1, 64, dtype)
        assert tuple(canonical(kind, spec) for kind in ("bf16", "fp16")) == kinds


def test_blocks_of_fewer_tokens_than_share_a_scale_have_scales_per_token_and_the_text_says_so() -> None:
    spec = KVSpec(32, 8, 128, "bfloat16", block_tokens=16)
    assert canonical("int8", spec) == "K=int8/token/sym,V=int8/token/asym"
    assert canonical("int4", spec) == "sinks:1(K=int8/token/sym,V=int4/token/asym)"
    assert canonical("fp8", spec) == "K=int8/token/sym,V=e4m3/token/sym"
    assert canonical("int4/channel:16/asym", spec) == "int4/channel:16/asym"
    assert canonical("int4/channel:17/asym", spec) == "int8/token/sym"
    larger = KVSpec(32, 8, 128, "bfloat16", block_tokens=96)
    assert canonical("int4/channel:64/asym", larger) == "int4/channel:64/asym"
    assert canonical("int4/channel:128/asym", larger) == "int4/channel:96/asym"


def test_a_latent_is_stored_as_k_is() -> None:
    assert canonical("int8", LATENT) == "int8/channel:64/asym"
    assert canonical("k8v4", LATENT) == "sinks:1(int8/channel:64/asym)"
    assert canonical("int4", LATENT) == "sinks:1(int4/channel:64/asym)"
    assert canonical("K=raw,V=int8/token/sym", LATENT) == "raw"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no plan ''; did you mean"),
        ("imt8", "did you mean 'int8'\\? Plans: raw, int8, k8v4, int4, int3, fp8, layered, mixed"),
        ("fp16x", "no plan 'fp16x'"),
        ("int5/token/sym", "no precision 'int5'"),
        ("sinks:1(", "does not end with the bracket that it opens"),
        ("sinks:1(raw", "does not end with the bracket that it opens"),
        ("sinks:1(raw)x", "does not end with the bracket that it opens"),
        ("sinks(raw)", "sinks needs a number of tokens, as in sinks:1\\(...\\)"),
        ("sinks:0(raw)", "as in sinks:1"),
        ("sinks:-1(raw)", "as in sinks:1"),
        ("sinks:1.5(raw)", "as in sinks:1"),
        ("recent(raw)", "recent needs a number of tokens, as in recent:128\\(...\\)"),
        ("sink:1(raw)", "what has brackets is sinks:N\\(...\\), recent:N\\(...\\) or layers\\(...\\)"),
        ("int4(raw)", "what has brackets"),
        ("sinks:1(sinks:2(raw))", "says twice how many first tokens are exact"),
        ("sinks:1(layers(0-31:sinks:2(raw)))", "says twice"),
        ("sinks:1(recent:4(raw))", "recent:N\\(...\\) can only be outermost"),
        ("recent:4(recent:4(raw))", "can only be outermost"),
        ("layers(0-31:recent:4(raw))", "a layer's plan can hold neither"),
        ("layers(0-31:layers(0-31:raw))", "a layer's plan can hold neither"),
        ("K=raw", "write K=int4/channel:64/asym,V=int4/token/asym"),
        ("K=raw,K=raw", "says what K is and not V"),
        ("V=raw,K=raw", "no plan 'V=raw,K=raw'"),
        ("layers()", "'' is no range of layers and its plan; write 0-9:int4, or 0-5/16:int4"),
        ("layers(0-31)", "'0-31' is no range of layers"),
        ("layers(a-b:raw)", "write 0-9:int4"),
        ("layers(0-31:raw;)", "'' is no range of layers"),
        ("layers(0-31 raw)", "is no range of layers"),
        ("layers(0-0.5:raw)", "is no range of layers"),
        ("layers(1/0-1:raw)", "1/0 is no layer"),
        ("layers(1/2:raw)", "1/2 is no layer"),
        ("layers(1/2-1/2:raw)", "1/2-1/2 are no fractions of the layers, from 0 to 1"),
        ("layers(1/2-3/2:raw)", "are no fractions"),
        ("layers(1-1/2:raw)", "are no fractions"),
        ("layers(5-3:raw)", "5-3 are no layers; write the first and the last"),
        ("layers(0-31:imt4)", "did you mean 'int4'"),
    ],
)
def test_what_is_no_plan_says_what_to_write(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_plan(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers(0-30:raw)", "layer 31 has no plan; the ranges must cover all 32 layers"),
        ("layers(1-31:raw)", "layer 0 has no plan"),
        ("layers(0-31:raw;31:int8)", "layer 31 has two plans"),
        ("layers(0-32:raw)", "there is no layer 32; the spec has 32"),
        ("layers(0-31:raw;40-50:int8)", "there is no layer 50; the spec has 32"),
        ("sinks:64(int4/token/sym)", "the exact first tokens must be fewer than the 64 of a block"),
        ("layers(0-31:sinks:64(raw))", "fewer than the 64"),
        ("recent:128(int8)", "Use K=int8/channel:64/asym,V=int8/token/asym"),
    ],
)
def test_what_blocks_of_a_spec_cannot_follow_says_why(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        canonical(text)


@pytest.mark.parametrize("text", ["sinks:1(", "layers(0-31:", "recent:1(", "(", "K=(", "sinks:1(layers(0-31:"])
def test_nesting_without_end_is_an_error_like_any_other(text: str) -> None:
    for whole in (text * 5000, text * 5000 + "raw" + ")" * 10_000, text * 5000 + "raw" + ")" * 5000):
        with pytest.raises(ConfigError) as caught:
            parse_plan(whole)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("plan", [None, 5, b"int8"])
def test_what_is_no_text_is_no_plan(plan):
    with pytest.raises(ConfigError, match="pass its name or text"):
        parse_plan(plan)


def test_a_plan_that_no_header_has_room_for_is_refused_in_few_words():
    with pytest.raises(ConfigError, match="a block header has room for 3,976") as refused:
        parse_plan("layers(" + ";".join(f"{i}:int8" for i in range(19999)) + ")")
    assert len(str(refused.value)) < 200
