import pytest

from kvtier.codecs.int8 import Int8Codec
from kvtier.codecs.plan import NAMED, canonical_plan
from kvtier.codecs.raw import RawCodec
from kvtier.codecs.registry import codec_for, codec_numbered, codecs
from kvtier.errors import ConfigError, UnknownCodec


def test_every_name_has_a_codec_and_every_codec_a_number_of_its_own() -> None:
    assert {canonical_plan(name) for name in NAMED} == {codec.plan for codec in codecs()}
    assert len({codec.number for codec in codecs()}) == len(codecs())


@pytest.mark.parametrize(("plan", "number", "kind"), [("raw", 1, RawCodec), ("int8/token/sym", 2, Int8Codec)])
def test_numbers_and_plans_never_change(plan: str, number: int, kind: type) -> None:
    assert isinstance(codec_for(plan), kind)
    assert codec_numbered(number) is codec_for(plan)


def test_a_name_is_its_canonical_text() -> None:
    assert canonical_plan("int8") == canonical_plan("int8/token/sym") == "int8/token/sym"
    assert codec_for("int8") is codec_for("int8/token/sym")


def test_unknown_plans_and_numbers_say_what_there_is() -> None:
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        canonical_plan("imt8")
    with pytest.raises(UnknownCodec, match="int8/token/sym"):
        codec_for("int3")
    with pytest.raises(UnknownCodec, match="1 \\(raw\\)"):
        codec_numbered(99)
