import json
import pickle
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.block import address
from kvtier.errors import BadTokens, ConfigError
from kvtier.keys import Keyspace, tokens_u32
from kvtier.spec import KVSpec

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "keys.json").read_text())
SPEC = KVSpec(layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=4)
SPACE = Keyspace(SPEC, model="m", revision="r", plan="raw")


@pytest.mark.parametrize("golden", GOLDEN)
def test_golden_vectors(golden):
    spec = KVSpec(**golden["spec"])
    space = Keyspace(spec, **golden["keyspace"])
    extra = golden["extra"] and [bytes.fromhex(e) for e in golden["extra"]]
    keys = space.chain(golden["tokens"], extra=extra)
    assert spec.canonical().hex() == golden["spec_canonical"]
    assert spec.digest.hex() == golden["spec_digest"]
    assert space.root.hex() == golden["root"]
    assert [k.hex() for k in keys] == golden["keys"]
    assert [address(k, 3).hex() for k in keys] == golden["addresses_of_rank_3"]
    assert space.named(sha256(b"page").digest()).hex() == golden["row_named_sha256_of_page"]


def changed(value):
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return value + "x"
        case dict():
            return {**value, "x": ""}


@pytest.mark.parametrize("field", [f.name for f in fields(Keyspace) if f.name != "spec"])
def test_every_field_of_the_keyspace_makes_other_keys(field):
    other = replace(SPACE, **{field: changed(getattr(SPACE, field))})
    assert other.root != SPACE.root
    assert not {*other.chain(range(16))} & {*SPACE.chain(range(16))}


@pytest.mark.parametrize("field", [f.name for f in fields(KVSpec) if f.name not in ("mla", "dtype")])
def test_every_number_of_the_spec_makes_other_keys(field):
    spec = replace(SPEC, **{field: changed(getattr(SPEC, field))})
    assert spec.digest != SPEC.digest
    assert replace(SPACE, spec=spec).root != SPACE.root


def test_dtype_and_latent_attention_make_other_keys():
    # one KV head, and K + V as wide as the latent: the same bytes a token, never the same keys
    specs = [
        KVSpec(layers=2, kv_heads=1, head_dim=8, dtype="float16"),
        KVSpec(layers=2, kv_heads=1, head_dim=8, dtype="bfloat16"),
        KVSpec(layers=2, kv_heads=1, head_dim=16, dtype="float16", mla=True),
    ]
    assert len({s.token_nbytes for s in specs}) == 1
    assert len({replace(SPACE, spec=s).root for s in specs}) == len({s.digest for s in specs}) == 3


def test_text_cannot_move_from_one_field_to_the_next():
    assert replace(SPACE, model="mr", revision="").root != replace(SPACE, model="m", revision="r").root
    assert replace(SPACE, adapter="a", adapter_digest="").root != replace(SPACE, adapter="", adapter_digest="a").root
    one, other = {"a": "b", "c": "d"}, {"a": "bc", "": "d"}
    assert replace(SPACE, overrides=one).root != replace(SPACE, overrides=other).root


def test_overrides_have_no_order_and_are_copied():
    given = {"b": "2", "a": "1"}
    space = replace(SPACE, overrides=given)
    same = replace(SPACE, overrides={"a": "1", "b": "2"})
    given["c"] = "3"
    assert space.root == same.root
    assert space == same
    assert hash(space) == hash(same)
    assert pickle.loads(pickle.dumps(space)).root == same.root


@pytest.mark.parametrize("fields", [{"model": ""}, {"tp_size": 0}, {"tp_size": 2**16}])
def test_keyspaces_that_cannot_be(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        replace(SPACE, **fields)


def test_keys_depend_on_everything_before_and_nothing_after():
    keys = SPACE.chain([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert SPACE.chain([1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0])[:2] == keys[:2]
    assert SPACE.chain([1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0])[2] != keys[2]
    assert not {*SPACE.chain([0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])} & {*keys}
    assert not {*SPACE.chain([5, 6, 7, 8])} & {*keys}


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_a_rest_that_fills_no_block_has_no_key(tokens):
    assert SPACE.chain(tokens) == []
    assert SPACE.chain([7, 7, 7, 7, *tokens]) == SPACE.chain([7, 7, 7, 7])


INTEGERS = [*"bBhHiIlLqQ", "<u4", ">u4", ">i8"]
TORCH_INTEGERS = [
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]


@pytest.mark.parametrize(
    "tokens",
    [
        (1, 2, 3, 4, 5),
        range(1, 6),
        *[np.array([1, 2, 3, 4, 5], dtype) for dtype in INTEGERS],
        np.arange(11)[1::2][:5] // 2 + 1,
        np.array([9, 1, 9, 2, 9, 3, 9, 4, 9, 5])[1::2],
        *[torch.tensor([1, 2, 3, 4, 5], dtype=dtype) for dtype in TORCH_INTEGERS],
        torch.tensor([[1, 9], [2, 9], [3, 9], [4, 9], [5, 9]])[:, 0],
    ],
    ids=lambda t: str(getattr(t, "dtype", type(t).__name__)),
)
def test_the_type_of_the_token_ids_does_not_matter(tokens):
    assert SPACE.chain(tokens) == SPACE.chain([1, 2, 3, 4, 5])
    assert tokens_u32(tokens).tobytes() == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0])


@pytest.mark.parametrize("tokens", [[], (), np.array([]), np.array([], np.int64), torch.tensor([])])
def test_no_tokens(tokens):
    assert SPACE.chain(tokens) == []


@pytest.mark.parametrize("tokens", [[0, 2**32 - 1, 0, 0], np.array([0, 2**32 - 1, 0, 0], np.uint64)])
def test_the_largest_token_id(tokens):
    assert tokens_u32(tokens).tolist() == [0, 4294967295, 0, 0]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -1], "-1"),
        ([1, 2**32], "4294967296"),
        ([1, 2**64], "integers"),
        ([1, 2.0], "float64"),
        (np.array([1.0]), "float64"),
        (torch.tensor([1.0]), "float32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "integers"),
        ([True, False], "bool"),
        (["1"], "integers"),
        ("1234", "one sequence"),
        (None, "one sequence"),
        (7, "one sequence"),
        ([[1, 2]], r"\[1, 2\]"),
        (torch.zeros(2, 2, dtype=torch.int64), r"\[2, 2\]"),
        ([[1, 2], [3]], "one sequence"),
    ],
)
def test_what_is_no_sequence_of_token_ids(tokens, message):
    with pytest.raises(BadTokens, match=message):
        SPACE.chain(tokens)


def test_extra_makes_other_keys_from_its_block_on():
    tokens = range(12)
    plain = SPACE.chain(tokens)
    assert SPACE.chain(tokens, extra=[b"", b"", b""]) == plain
    image = SPACE.chain(tokens, extra=[b"", b"image", b""])
    assert image[0] == plain[0]
    assert image[1] != plain[1]
    assert image[2] != plain[2]
    assert SPACE.chain(tokens, extra=[b"", b"other", b""])[1] != image[1]


@pytest.mark.parametrize("extra", [[], [b""], [b""] * 4])
def test_extra_has_one_entry_a_block(extra):
    with pytest.raises(BadTokens, match="3 whole blocks"):
        SPACE.chain(range(14), extra=extra)
