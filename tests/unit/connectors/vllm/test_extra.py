"""Keys hold everything of a request that its KV depends on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.connectors.vllm.extra import Unstorable, extras

IMAGE = "ab" * 32
OTHER = "lora:" + "cd" * 32


def request(*features: tuple[str, int, int], salt: str | None = None, **changes: object) -> SimpleNamespace:
    places = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
        for name, offset, length in features
    ]
    return SimpleNamespace(prompt_token_ids=[1], prompt_embeds=None, mm_features=places, cache_salt=salt, **changes)


def test_text_alone_depends_on_its_tokens_only() -> None:
    assert extras(request(), 64, 4) is None


def test_a_salt_is_in_the_first_block() -> None:
    # Length and text of the tag, then of the salt: 4-byte little-endian lengths.
    assert extras(request(salt="x"), 64, 3) == [b"\4\0\0\0salt\1\0\0\0x", b"", b""]
    assert extras(request(salt="x"), 64, 0) == []


def test_an_image_is_in_every_block_that_it_touches_and_where_it_begins_there() -> None:
    found = extras(request((IMAGE, 100, 60)), 64, 4)
    assert [bool(each) for each in found] == [False, True, True, False]
    name = b"\2\0\0\0mm\x40\0\0\0" + IMAGE.encode() + b"\x08\0\0\0"
    assert found[1] == name + (36).to_bytes(8, "little", signed=True)
    assert found[2] == name + (-28).to_bytes(8, "little", signed=True)


def test_another_image_another_place_or_another_order_is_another_key() -> None:
    cases = [
        request((IMAGE, 0, 32), (OTHER, 32, 32)),
        request((OTHER, 0, 32), (IMAGE, 32, 32)),
        request((IMAGE, 0, 32), (OTHER, 33, 31)),
        request((IMAGE, 0, 32)),
        request((IMAGE, 0, 32), salt="x"),
    ]
    assert len({extras(case, 64, 1)[0] for case in cases}) == len(cases)


def test_images_beyond_the_last_whole_block_change_nothing() -> None:
    assert extras(request((IMAGE, 130, 30)), 64, 2) == [b"", b""]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (request(("my-picture", 0, 10)), "multimodal_name"),
        (request((None, 0, 10)), "multimodal_name"),
        (request(("550e8400e29b41d4a716446655440000", 0, 10)), "multimodal_name"),
        (request((IMAGE + "\n", 0, 10)), "multimodal_name"),
        (request(lora_request=SimpleNamespace(load_inplace=True)), "adapter_in_place"),
        (SimpleNamespace(prompt_token_ids=None, prompt_embeds=object(), cache_salt=None), "prompt_embeds"),
    ],
)
def test_what_no_digest_names_is_not_stored(asked: SimpleNamespace, why: str) -> None:
    with pytest.raises(Unstorable, match=why):
        extras(asked, 64, 0)
