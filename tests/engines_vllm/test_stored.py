"""Which KV can be stored, and what names it: vLLM's own specifications, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvtier.connectors.vllm import stored as module
from kvtier.connectors.vllm.options import Options
from kvtier.connectors.vllm.stored import Stored, stored
from kvtier.errors import ConfigError, UnsupportedKV
from kvtier.spec import KVSpec

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=128)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
STATE = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))


class Hub:
    """A configuration of a model."""

    def __init__(self, **fields: object) -> None:
        self._fields = {"hidden_size": 64, "vocab_size": 10, **fields}
        vars(self).update(fields)

    def to_dict(self) -> dict[str, object]:
        return dict(self._fields)


def engine(hub: Hub | None = None, load_format: str = "auto", **changes: object) -> SimpleNamespace:
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "distributed_executor_backend": "mp"}
    model = {"model": "name/of-it", "hf_config": hub or Hub(), "dtype": torch.bfloat16, "quantization": None, "seed": 0}
    given = {name: value for name, value in changes.items() if name not in parallel}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel | {k: v for k, v in changes.items() if k in parallel}),
        speculative_config=given.get("speculative_config"),
        cache_config=SimpleNamespace(**{"enable_prefix_caching": True, "cache_dtype": "auto"} | given),
        load_config=SimpleNamespace(load_format=load_format),
        model_config=SimpleNamespace(**model | {"max_model_len": 4096} | given),
    )


def layers(*groups: Any, replicas: int = 1) -> KVCacheConfig:
    """Two layers a group, numbered in turn, as vLLM groups a hybrid model's."""
    names = [
        [f"model.layers.{number}.self_attn.attn" for number in range(at, 2 * len(groups), len(groups))]
        for at in range(len(groups))
    ]
    made = [KVCacheGroupSpec(name, spec) for name, spec in zip(names, groups, strict=True)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=made, kv_tp_replicas=replicas)


def named(described: Stored, **of: Any) -> tuple[object, ...]:
    recipe = described.named(**{"revision": "r", "generation": "", "adapter": None} | of)
    return recipe.spec, recipe.overrides, recipe.parts


def on_gpu(*groups: Any, given: dict[str, Any] | None = None, replicas: int = 1, **config: Any) -> Stored:
    return stored(engine(**config), layers(*groups, replicas=replicas), Options.of(given or {}))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_platform", lambda: "cuda")


def test_layers_of_full_attention() -> None:
    described = on_gpu(FULL)
    assert described.spec == KVSpec(2, 2, 64, "bfloat16", block_tokens=64)
    assert described.names == ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
    assert (described.page_tokens, described.hybrid, described.opaque, described.shards) == (16, False, False, 1)
    assert dict(described.recipe.parts)["layout"] == "canonical"


def test_layers_are_in_the_order_of_their_numbers() -> None:
    names = [f"model.layers.{number}.attn" for number in (10, 2, 1)]
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, FULL)])
    assert stored(engine(), config, Options()).names == tuple(reversed(names))


def test_a_latent_is_the_same_on_all_ranks() -> None:
    described = on_gpu(LATENT, tensor_parallel_size=8)
    assert described.spec == KVSpec(2, 1, 576, "bfloat16", block_tokens=64, mla=True)
    assert (described.shards, described.replicas) == (1, 8)
    assert named(described) == named(on_gpu(LATENT))


def test_each_rank_stores_its_heads_once() -> None:
    described = on_gpu(FULL, tensor_parallel_size=8, replicas=4)
    assert (described.shards, described.replicas) == (2, 4)
    assert dict(described.recipe.parts)["tp_size"] == 2
    assert named(described) != named(on_gpu(FULL))


def test_windows_are_in_pages_of_their_own() -> None:
    described = on_gpu(WINDOW, FULL)
    assert described.hybrid
    assert described.groups == (0, 1, 0, 1)
    assert described.runs == ((0, range(1)), (1, range(1, 2)), (0, range(2, 3)), (1, range(3, 4)))
    assert on_gpu(WINDOW).runs == ((0, range(2)),)


def test_a_byte_an_element_is_stored_as_bytes() -> None:
    described = on_gpu(FullAttentionSpec(**SHAPE | {"dtype": torch.float8_e4m3fn}))
    assert described.spec == KVSpec(2, 2, 32, "bfloat16", block_tokens=64)
    assert dict(described.recipe.parts)["layout"].startswith("opaque:")
    other = on_gpu(FullAttentionSpec(**SHAPE | {"dtype": torch.float8_e5m2}))
    assert named(described) != named(other)
    with pytest.raises(ConfigError, match="leave plan out"):
        on_gpu(FullAttentionSpec(**SHAPE | {"dtype": torch.float8_e4m3fn}), given={"plan": "int8"})


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_cpus_pages_say_how_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_platform", lambda: "cpu")
    described = on_gpu(FullAttentionSpec(**SHAPE | {"block_size": 32}))
    kind, name, version, capability, isa, order, page = (
        dict(described.recipe.parts)["layout"].replace(":", "/").split("/")
    )
    assert (kind, name[:4], page) == ("opaque", "vllm", "32")
    assert all((version, capability, isa, order))
    assert described.opaque
    with pytest.raises(ConfigError, match="packs them in its own way"):
        on_gpu(FullAttentionSpec(**SHAPE | {"block_size": 32}), given={"plan": "int8"})


def test_plans_are_checked_at_the_start() -> None:
    assert dict(on_gpu(FULL, given={"plan": "int8"}).recipe.parts)["plan"].startswith("K=int8/")  # never the name
    with pytest.raises(ConfigError, match="int9"):
        on_gpu(FULL, given={"plan": "int9"})


def test_what_changes_the_kv_is_in_the_name() -> None:
    stretched = {"rope_parameters": {"rope_type": "longrope"}}
    names = [
        named(on_gpu(FULL)),
        named(on_gpu(FULL, hub=Hub(rope_theta=1e6))),
        named(on_gpu(FULL, dtype=torch.float16)),
        named(on_gpu(FULL, quantization="awq")),
        named(on_gpu(FULL, load_format="dummy")),
        named(on_gpu(FULL, load_format="dummy", seed=1)),
        named(on_gpu(FULL, hub=Hub(**stretched))),
        named(on_gpu(FULL, hub=Hub(**stretched), max_model_len=8192)),
        named(on_gpu(FULL, given={"tenant": "t"})),
        named(on_gpu(FULL, given={"model": "m"})),
        named(on_gpu(FULL, given={"block_tokens": 128})),
        named(on_gpu(FULL), revision="s"),
        named(on_gpu(FULL), generation="g"),
        named(on_gpu(FULL), adapter=("a", "d")),
        named(on_gpu(FULL), adapter=("a", "e")),
    ]
    assert len(set(names)) == len(names)
    # A longer limit changes nothing where RoPE does not depend on it.
    assert named(on_gpu(FULL, max_model_len=8192)) == names[0]


@pytest.mark.parametrize(
    ("groups", "changes", "says"),
    [
        ((FULL, STATE), {}, "MambaSpec"),
        ((), {}, "none"),
        ((FULL, FullAttentionSpec(**SHAPE | {"head_size": 128})), {}, "different shapes"),
        ((SlidingWindowSpec(**SHAPE, sliding_window=32),), {}, "make block_tokens smaller"),
        ((FULL,), {"pipeline_parallel_size": 2}, "pipeline"),
        ((FULL,), {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "mp or ray"),
        ((FULL,), {"enable_prefix_caching": False}, "prefix caching is off"),
        ((FULL,), {"calculate_kv_scales": True}, "scales"),
        ((FULL,), {"speculative_config": SimpleNamespace(method="eagle")}, "eagle"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_reason(
    groups: tuple[Any, ...], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedKV, match=says):
        on_gpu(*groups, **changes)


def test_ways_to_speculate_that_keep_no_kv_are_fine() -> None:
    assert on_gpu(FULL, speculative_config=SimpleNamespace(method="ngram")).shards == 1


def test_windows_cannot_be_loaded_within_a_step() -> None:
    with pytest.raises(ConfigError, match="sync"):
        on_gpu(WINDOW, FULL, given={"load": "sync"})
