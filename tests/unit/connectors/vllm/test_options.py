"""What a user says of the connector is checked before anything runs."""

from __future__ import annotations

import pytest

from kvtier.connectors.vllm.options import Options
from kvtier.errors import ConfigError


def test_everything_has_a_default() -> None:
    options = Options.of({})
    assert (options.plan, options.load, options.wait, options.save) == ("raw", "async", 1.0, True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lod": "sync"}, "did you mean 'load'"),
        ({"nothing_like_it": 1}, "use one of target"),
        ({"load": "later"}, "load"),
        ({"wait": -1}, "wait"),
        ({"wait": 61}, "wait"),
        ({"ttl": 0}, "ttl"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"save": "no"}, "save"),
        ({"plan": ""}, "plan"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Options.of(given)


@pytest.mark.parametrize(
    ("wanted", "page", "block"), [(64, 16, 64), (64, 32, 64), (64, 48, 48), (64, 128, 128), (100, 32, 96), (1, 16, 16)]
)
def test_a_block_is_whole_pages_and_nearly_as_long_as_asked(wanted: int, page: int, block: int) -> None:
    assert Options.of({"block_tokens": wanted}).block_of(page) == block
