from __future__ import annotations

import json

import pytest

from kvtier.advisor.models import ALIASES, LATENTS, SHAPES, spec_of
from kvtier.errors import ConfigError, UnsupportedKV


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [
        # 2 (K and V) x layers x KV heads x head dimension x 2 bytes
        ("llama-3.1-8b", 2 * 32 * 8 * 128 * 2),
        ("llama-3.1-70b", 2 * 80 * 8 * 128 * 2),
        ("qwen2.5-7b", 2 * 28 * 4 * 128 * 2),
        ("smollm2-135m", 2 * 30 * 3 * 64 * 2),
        # one latent of kv_lora_rank 512 and 64 for RoPE: 70,272 bytes a token, as DeepSeek's reports have it
        ("deepseek-v3", 61 * 576 * 2),
        # no grouped heads: half a MiB a token
        ("llama-7b", 512 << 10),
        ("llama-2-70b", 2 * 80 * 8 * 128 * 2),
        ("gpt2", 2 * 12 * 768 * 2),
        ("gemma-2b", 2 * 18 * 256 * 2),
    ],
)
def test_bytes_of_a_token(model, nbytes):
    assert spec_of(model, 64).token_nbytes == nbytes


def test_every_model_has_a_spec():
    for model in (*SHAPES, *LATENTS, *ALIASES):
        assert spec_of(model, 512).block_tokens == 512


def test_an_unknown_model_is_said_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"no model 'Llama-3.1-9B-Instruct'; did you mean 'llama-3.1-8b'"):
        spec_of("Llama-3.1-9B-Instruct", 64)


def test_names_as_the_hub_writes_them(tmp_path, monkeypatch):
    """But for a folder that is there: it is what it says itself."""
    for name in (
        "meta-llama/Llama-3.1-8B",
        "Llama-3.1-8B-Instruct",
        "Qwen/Qwen2.5-7B-Instruct",
        "meta-llama/Llama-2-7b-hf",
    ):
        assert spec_of(name, 64).layers in (28, 32)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "meta-llama" / "Llama-3.1-8B"
    folder.mkdir(parents=True)
    raw = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    (folder / "config.json").write_text(json.dumps(raw))
    assert spec_of("meta-llama/Llama-3.1-8B", 64).layers == 4


@pytest.mark.parametrize("dtype", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("folder", [False, True])
def test_a_config_of_hugging_face(tmp_path, dtype, folder):
    path = tmp_path / "config.json"
    raw = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    path.write_text(json.dumps(raw | {dtype: "bfloat16"}))
    spec = spec_of(str(tmp_path if folder else path), 32)
    assert (spec.layers, spec.kv_heads, spec.head_dim, spec.dtype, spec.block_tokens) == (4, 2, 64, "bfloat16", 32)


def test_the_text_part_of_a_config(tmp_path):
    path = tmp_path / "config.json"
    text = {"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 32, "dtype": "float16"}
    path.write_text(json.dumps({"model_type": "sees", "text_config": text}))
    assert spec_of(str(path), 64).token_nbytes == 2 * 4 * 8 * 32 * 2


@pytest.mark.parametrize(
    "older",
    [
        {"n_layer": 6, "n_head": 8, "n_embd": 256},  # GPT-2, GPT-J
        {"n_layers": 6, "n_heads": 8, "d_model": 256},  # MPT
        {"n_layer": 6, "num_attention_heads": 8, "n_embed": 256},  # BLOOM
        {"n_layers": 6, "n_heads": 16, "d_model": 512, "attn_config": {"kv_n_heads": 8}},  # DBRX
    ],
)
def test_configs_of_older_models(tmp_path, older):
    """They have other names, and no dtype."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(older))
    spec = spec_of(str(path), 64)
    assert (spec.layers, spec.kv_heads, spec.head_dim, spec.dtype) == (6, 8, 32, "bfloat16")


def test_a_model_whose_kv_is_not_one_entry_a_token_is_refused(tmp_path):
    path = tmp_path / "config.json"
    raw = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512, "dtype": "bfloat16"}
    path.write_text(json.dumps(raw | {"layer_types": ["full_attention", "sliding_attention"]}))
    with pytest.raises(UnsupportedKV, match="sliding_attention"):
        spec_of(str(path), 64)


@pytest.mark.parametrize(
    "field",
    [
        {"attention_chunk_size": 8192},  # Llama 4
        {"attn_layer_period": 8, "attn_layer_offset": 4},  # Jamba
        {"full_attention_interval": 4},  # Qwen3-Next
        {"hybrid_override_pattern": "M-M*"},  # Nemotron-H
        {"cross_attention_layers": [3, 8]},  # Mllama
    ],
)
def test_fields_that_say_so_without_layer_types(tmp_path, field):
    path = tmp_path / "config.json"
    raw = {"num_hidden_layers": 48, "num_attention_heads": 8, "hidden_size": 512}
    path.write_text(json.dumps({"text_config": raw | field}))
    with pytest.raises(UnsupportedKV, match=next(iter(field))):
        spec_of(str(path), 64)
    path.write_text(json.dumps({"text_config": raw | field | {"layer_types": ["full_attention"] * 48}}))
    assert spec_of(str(path), 64).layers == 48


@pytest.mark.parametrize("model", ["~nobody-of-this-name/config.json", "a" * 300, "/" + "a" * 300])
def test_a_path_that_cannot_be_is_said(model):
    with pytest.raises(ConfigError):
        spec_of(model, 64)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"num_attention_heads": 8, "hidden_size": 512}', "has no num_hidden_layers"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 0, "num_key_value_heads": 2, "hidden_size": 512}', "shape"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": "64"}', "KVSpec.head_dim is '64'"),
        ('{"num_hidden_layers": 1000000, "num_attention_heads": 8, "head_dim": 64}', "write 10,000 at most"),
        ("[" * 100_000, "no Hugging Face config.json"),
    ],
)
def test_what_is_wrong_with_a_config_is_said(tmp_path, text, says):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"config.json .*{says}|{says}"):
        spec_of(str(path), 64)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "{", '{"dtype": "bfloat16"}', '{"dtype": "int7", "num_hidden_layers": 2}']
)
def test_what_is_no_config_is_said(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        spec_of(str(path), 64)
