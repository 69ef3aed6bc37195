from types import SimpleNamespace

import pytest
import torch

from kvtier.errors import ConfigError, UnsupportedKV
from kvtier.spec import KVSpec

GQA = KVSpec(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16")


def hf(**fields):
    """A Hugging Face configuration, SmolLM2-135M's unless told otherwise."""
    return SimpleNamespace(
        **{
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 576,
            "dtype": torch.bfloat16,
        }
        | fields
    )


def test_bytes_of_grouped_query_attention():
    # 30 layers x 3 heads x (64 of K + 64 of V) x 2 bytes
    assert GQA.head_dims == (64, 64)
    assert GQA.token_nbytes == 30 * 3 * 128 * 2 == 23_040
    assert GQA.block_nbytes == 64 * 23_040


def test_bytes_of_keys_and_values_of_different_width():
    spec = KVSpec(layers=2, kv_heads=4, head_dim=192, v_head_dim=128, dtype="float32", block_tokens=16)
    assert spec.head_dims == (192, 128)
    assert spec.block_nbytes == 16 * 2 * 4 * 320 * 4


def test_bytes_of_latent_attention():
    # DeepSeek-V3: 61 layers, one latent of 512 + 64
    spec = KVSpec(layers=61, kv_heads=1, head_dim=576, dtype="bfloat16", mla=True)
    assert spec.head_dims == (576,)
    assert spec.v_head_dim == 0
    assert spec.token_nbytes == 61 * 576 * 2 == 70_272


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "block_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2**31, 2.0, "3", None])
def test_sizes_are_positive_integers(field, value):
    fields = {"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": "float16", "v_head_dim": 1, field: value}
    with pytest.raises(ConfigError, match=f"KVSpec.{field}"):
        KVSpec(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int8"}, "bfloat16, float16, float32"),
        ({"dtype": torch.float16}, "KVSpec.dtype"),
        ({"first_layer": -1}, "first_layer"),
        ({"first_layer": 2**32}, "first_layer"),
        ({"v_head_dim": 0}, "v_head_dim"),
        ({"v_head_dim": -2}, "v_head_dim"),
        ({"v_head_dim": 2**32}, "v_head_dim"),
        ({"mla": True}, "kv_heads=1"),
        ({"mla": True, "kv_heads": 1, "v_head_dim": 64}, "no v_head_dim"),
    ],
)
def test_specs_that_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        KVSpec(**{"layers": 2, "kv_heads": 2, "head_dim": 64, "dtype": "float16"} | fields)


def test_from_hf_divides_the_hidden_size_by_the_heads():
    assert KVSpec.from_hf(hf()) == GQA


def test_from_hf_takes_an_explicit_head_dim_dtype_and_block():
    spec = KVSpec.from_hf(hf(head_dim=128), dtype=torch.float32, block_tokens=16)
    assert spec == KVSpec(layers=30, kv_heads=3, head_dim=128, dtype="float32", block_tokens=16)
    assert KVSpec.from_hf(hf(head_dim=128), dtype="float32", block_tokens=16) == spec


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        ({"num_key_value_heads": None}, 9),  # GPT-2: multi-head
        ({"num_key_value_heads": 1}, 1),
        ({"num_key_value_heads": None, "multi_query": True}, 1),  # Falcon-7B, GPT-BigCode
        (
            {
                "num_key_value_heads": None,
                "num_kv_heads": 8,
                "multi_query": True,
                "new_decoder_architecture": True,
            },
            8,
        ),  # Falcon-40B
    ],
)
def test_from_hf_counts_the_kv_heads(fields, kv_heads):
    assert KVSpec.from_hf(hf(**fields)).kv_heads == kv_heads


def test_from_hf_reads_the_text_part():
    text = hf()
    assert KVSpec.from_hf(SimpleNamespace(get_text_config=lambda: text, num_hidden_layers=99)) == GQA


def test_from_hf_latent_attention():
    spec = KVSpec.from_hf(hf(num_hidden_layers=61, kv_lora_rank=512, qk_rope_head_dim=64))
    assert spec == KVSpec(layers=61, kv_heads=1, head_dim=576, dtype="bfloat16", mla=True)


@pytest.mark.parametrize("dtype", [None, torch.int8, "auto"])
def test_from_hf_without_a_storable_dtype(dtype):
    with pytest.raises(ConfigError, match="dtype="):
        KVSpec.from_hf(hf(dtype=dtype))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"\[1\] are sliding_attention"),
        ({"layer_types": ["linear_attention"] * 9}, r"\.\.\. are linear_attention"),
        ({"sliding_window": 4096}, "4096 tokens"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "4096 tokens"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_from_hf_refuses_what_has_no_prefix_kv(fields, message):
    with pytest.raises(UnsupportedKV, match=message):
        KVSpec.from_hf(hf(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 4096, "use_sliding_window": False},  # Qwen2
        {"sliding_window": None},
        {"layer_types": ["full_attention"] * 30, "sliding_window": 4096},
    ],
)
def test_from_hf_accepts_a_window_that_no_layer_uses(fields):
    assert KVSpec.from_hf(hf(**fields)) == GQA
