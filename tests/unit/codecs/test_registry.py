import numpy as np
import pytest

from kvtier.block import PAGE, BlockHeader
from kvtier.codecs.plan import NAMED, canonical_plan
from kvtier.codecs.registry import NUMBERS, codec_for, codec_of
from kvtier.errors import ConfigError, CorruptPayload, UnknownCodec
from kvtier.spec import KVSpec

SPEC = KVSpec(2, 2, 16, "bfloat16")


def header(**fields: object) -> BlockHeader:
    codec = codec_for("int4", SPEC)
    known = {"codec": codec.number, "plan": codec.plan, "spec_digest": SPEC.digest, "body_nbytes": codec.nbytes(0)}
    return BlockHeader(key=bytes(32), rank=0, position=0, checksum=0, **({"tokens": 64} | known | fields))


def test_numbers_of_codecs_are_never_given_away_again() -> None:
    """1 and 2 were those of raw and of int8 per token, before there were plans."""
    assert NUMBERS == (3,)
    assert codec_for("raw", SPEC).number == 3


def test_a_name_and_its_text_are_one_codec() -> None:
    for name in NAMED:
        if name != "mixed":
            text = canonical_plan(name, SPEC)
            assert codec_for(name, SPEC) is codec_for(text, SPEC)
            assert codec_for(name, SPEC).plan == text
            assert codec_for(name, SPEC).spec == SPEC


def test_a_header_leads_to_the_codec_that_wrote_it() -> None:
    assert codec_of(header(), SPEC) is codec_for("int4", SPEC)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"codec": 1}, "no codec number 1; this version has 3"),
        ({"codec": 2}, "no codec number 2"),
        ({"codec": 99}, "no codec number 99"),
        ({"spec_digest": bytes(32)}, "the block's spec is 0000000000000000"),
        ({"plan": "int9/token/sym"}, "a block has a plan that this version cannot read: no precision 'int9'"),
        ({"plan": "layers(0-99:raw)"}, "this version cannot read: .* there is no layer 99"),
        ({"plan": "mixed"}, "this version cannot read: .* no age"),
    ],
)
def test_blocks_that_this_version_cannot_read_say_why(fields: dict[str, object], says: str) -> None:
    with pytest.raises(UnknownCodec, match=says):
        codec_of(header(**fields), SPEC)


@pytest.mark.parametrize("fields", [{"body_nbytes": 5}, {"tokens": 7}])
def test_a_header_whose_sizes_are_not_its_plans_is_corrupt(fields: dict[str, object]) -> None:
    with pytest.raises(CorruptPayload, match="of its plan and spec it would have 64"):
        codec_of(header(**fields), SPEC)


def test_unknown_plans_are_the_callers_to_mend() -> None:
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        codec_for("imt8", SPEC)


def test_a_plan_too_long_for_a_header_is_said_when_it_is_packed() -> None:
    plan = ";".join(f"{i}:K=int8/channel:{i + 2}/asym,V=raw" for i in range(200))
    spec = KVSpec(200, 1, 16, "bfloat16", block_tokens=256)
    codec = codec_for(f"layers({plan})", spec)
    assert len(codec.plan) > PAGE
    with pytest.raises(ConfigError, match=rf"the plan text has {len(codec.plan)} bytes; at most 3952 fit"):
        header(plan=codec.plan, spec_digest=spec.digest).pack()


def test_the_first_block_is_longer_by_what_it_keeps_exact() -> None:
    codec = codec_for("sinks:2(int8/token/sym)", SPEC)
    # of 64 tokens, 2 heads, 16 wide: 2 x 2 x 16 x 2 bytes more, and 2 x (32 + 4) bytes less: 56, which padding rounds
    assert codec.nbytes(0) - codec.nbytes(1) == 2 * 2 * 64
    assert np.array_equal(codec.layers(5), codec.layers(1))
