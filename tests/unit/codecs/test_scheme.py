import pytest
from hypothesis import given

from kvtier.codecs.scheme import GRANULARITIES, OPTIONS, PRECISIONS, Scheme
from kvtier.errors import ConfigError
from tests.codec_cases import schemes


@given(text=schemes())
def test_a_scheme_is_its_text(text: str) -> None:
    scheme = Scheme.parse(text)
    assert str(scheme) == text
    assert Scheme.parse(f" {text.replace('/', ' / ')} ") == scheme


def test_what_is_not_said_has_a_default_and_options_have_one_order() -> None:
    assert str(Scheme.parse("int4/channel/asym")) == "int4/channel:64/asym"
    assert str(Scheme.parse("int4/token/sym/lloyd/hadamard")) == "int4/token/sym/hadamard/lloyd"
    assert str(Scheme.parse("int4/token/sym/clip/hadamard")) == "int4/token/sym/hadamard/clip"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no precision ''"),
        ("int5/token/sym", "did you mean 'int8'|did you mean 'int4'"),
        ("e4m3fn", "did you mean 'e4m3'"),
        ("quux", f"known: {', '.join(PRECISIONS)}"),
        ("raw/token/sym", "raw has no scale, so nothing follows it"),
        ("bf16/", "bf16 has no scale"),
        ("int8", "write it as int8/token/sym or int8/channel:64/asym"),
        ("int4/token", "write it as int4/token/sym"),
        ("int4/sym/token", "write it as int4/token/sym"),
        ("e4m3/token/symm", "write it as e4m3/token/sym"),
        ("int8/tokens/sym", "did you mean 'token'"),
        ("int8/xyzzy/sym", f"known: {', '.join(GRANULARITIES)}"),
        ("int8/token:4/sym", "token takes no number"),
        ("int8/tensor:1/sym", "tensor takes no number"),
        ("int8/group/sym", "group needs how many share a scale, 2 or more, as in group:64"),
        ("int8/group:/sym", "as in group:64"),
        ("int8/channel:/sym", "as in channel:64"),
        ("int8/channel:1/sym", "2 or more"),
        ("int8/channel:0/sym", "2 or more"),
        ("int8/channel:-4/sym", "as in channel:64"),
        ("int8/channel:064/sym", "as in channel:64"),
        ("int8/channel:6.4/sym", "as in channel:64"),
        ("int8/channel:٦٤/sym", "as in channel:64"),
        ("int8/group:1000000/sym", "as in group:64"),
        ("int8/token/sym/hadamrd", "did you mean 'hadamard'"),
        ("int8/token/sym/xyzzy", f"known: {', '.join(OPTIONS)}"),
        ("int8/token/sym/", "'' is repeated or unknown"),
        ("int4/token/sym/clip/clip", "'clip' is repeated"),
        ("int4/token/sym/asym", "'asym' is repeated or unknown"),
        ("int4/token/sym/lloyd", "as in int4/token/sym/hadamard/lloyd"),
        ("int8/token/sym/hadamard/lloyd", "lloyd is for int4, int3 or int2"),
        ("e4m3/token/sym/hadamard/lloyd", "lloyd is for int4, int3 or int2"),
        ("int4/token/asym/hadamard/lloyd", "as in int4/token/sym/hadamard/lloyd"),
        ("int4/group:32/sym/hadamard/lloyd", "as in int4/token/sym/hadamard/lloyd"),
        ("int4/token/sym/hadamard/lloyd/clip", "clip is for integers .* without lloyd"),
        ("e4m3/token/sym/clip", "clip is for integers"),
        ("int8/tensor/sym/clip", "clip is for integers .* token, channel or group"),
    ],
)
def test_what_is_no_scheme_says_what_to_write(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Scheme.parse(text)
