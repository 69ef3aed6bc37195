"""Which of vLLM's KV can be stored, and what names it."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.codecs.plan import canonical_plan
from kvtier.connectors.configs import config_digest
from kvtier.connectors.vllm.messages import Recipe
from kvtier.connectors.vllm.options import Options
from kvtier.errors import ConfigError, UnsupportedKV
from kvtier.spec import ITEMSIZE, KVSpec

FULL = frozenset(("FullAttentionSpec", "MLAAttentionSpec"))
"""Kinds of vLLM's layers that keep KV of every token for as long as a sequence lasts."""
WINDOW = "SlidingWindowSpec"
"""The kind that keeps it for as long as a window has not passed it: every token's is there when it is computed."""
DRAFTLESS = frozenset(("ngram", "ngram_gpu", "suffix"))
"""Ways to speculate that keep no KV of their own."""
STRETCHED = ("longrope", "dynamic", "su")
"""Kinds of RoPE that vLLM computes for the longest sequence that it was started for."""


@dataclass(frozen=True)
class Stored:
    """How one engine's layers lie in blocks.

    Attributes:
        names: vLLM's names of the layers, in their order in a block.
        groups: for each layer the number of vLLM's group that it is in, and so which pages its KV is in.
        page_tokens: tokens in a page.
        spec: shape of the KV of one rank, as bytes of bfloat16 when vLLM quantised it.
        opaque: whether what is inside a page is the engine's own affair.
        shards: ranks whose KV differs.
        replicas: consecutive ranks that have the same KV.
        recipe: how the keyspace is opened, but for the revision.
    """

    names: tuple[str, ...]
    groups: tuple[int, ...]
    page_tokens: int
    spec: KVSpec
    opaque: bool
    shards: int
    replicas: int
    recipe: Recipe

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.spec.block_tokens

    @property
    def hybrid(self) -> bool:
        """Whether layers of one block are in different pages."""
        return len(set(self.groups)) > 1

    @property
    def runs(self) -> tuple[tuple[int, range], ...]:
        """Layers that follow each other and are of one group: its number, and which they are."""
        starts = [at for at in range(len(self.groups)) if not at or self.groups[at] != self.groups[at - 1]]
        ends = [*starts[1:], len(self.groups)]
        return tuple((self.groups[at], range(at, end)) for at, end in zip(starts, ends, strict=True))

    def named(self, revision: str, generation: str, adapter: tuple[str, str] | None) -> Recipe:
        """The recipe of what is computed with these weights.

        Args:
            revision: of the weights.
            generation: other than "" once the weights may have changed under the revision's name.
            adapter: name and digest of a LoRA.
        """
        parts = {"revision": revision}
        if adapter is not None:
            parts |= {"adapter": adapter[0], "adapter_digest": adapter[1]}
        return self.recipe.but(overrides={"vllm.generation": generation} if generation else None, **parts)


def stored(config: Any, kv: Any, options: Options) -> Stored:
    """Look at an engine's configuration.

    Args:
        config: `VllmConfig`.
        kv: `KVCacheConfig`.
        options: of the connector.

    Raises:
        UnsupportedKV: layers, parallelism or caches whose blocks cannot be shared by prefix.
        ConfigError: a plan that the model's KV cannot be stored with.
    """
    _refuse(config)
    layers = sorted(_layers(kv), key=lambda layer: _numbers(layer[0]))
    kinds = {type(spec).__name__ for _, _, spec in layers}
    if not kinds or not kinds <= FULL | {WINDOW}:
        raise UnsupportedKV(
            f"the model has layers of the kind {', '.join(sorted(kinds - FULL - {WINDOW})) or 'none'}: a state, and "
            "not KV of every token, so that its blocks cannot be shared by prefix; use a model whose layers all have "
            "full attention or a sliding window"
        )
    shapes = {_shape(spec) for _, _, spec in layers}
    if len(shapes) > 1:
        raise UnsupportedKV(f"the model's layers keep KV of different shapes ({shapes}); kvtier needs one for all")
    (heads, dim, v_dim, dtype, page), mla = shapes.pop(), "MLAAttentionSpec" in kinds
    cpu = _platform() == "cpu"
    _refuse_windows([spec for _, _, spec in layers], options.block_of(page), options.load)
    spec = _spec(options.block_of(page), len(layers), heads, (dim, v_dim), dtype, mla=mla)
    layout = _layout(config, kv, page, dim, layers[0][2], cpu=cpu)
    if layout != "canonical" and options.plan != "raw":
        raise ConfigError(
            f"plan is {options.plan!r}, and this engine's pages can only be stored as they are "
            f"({'a CPU packs them in its own way' if cpu else 'they are quantised already'}); leave plan out"
        )
    size = int(config.parallel_config.tensor_parallel_size)
    replicas = size if mla else int(getattr(kv, "kv_tp_replicas", 1))
    recipe = Recipe(spec, (), ()).but(
        overrides=_identity(config) | ({"vllm.kv": dtype} if dtype not in ITEMSIZE else {}),
        model=options.model or model_name(config),
        plan=canonical_plan(options.plan, spec),
        ttl=options.ttl,
        layout=layout,
        tp_size=size // replicas,
        tenant=options.tenant,
    )
    names, groups = tuple(name for name, _, _ in layers), tuple(group for _, group, _ in layers)
    return Stored(names, groups, page, spec, cpu, size // replicas, replicas, recipe)


def model_name(config: Any) -> str:
    """A model's name on the hub, or its folder's."""
    name = str(config.model_config.model)
    return Path(name).resolve().name if Path(name).exists() else name


def _refuse(config: Any) -> None:
    parallel, speculative = config.parallel_config, config.speculative_config
    if not config.cache_config.enable_prefix_caching:
        raise UnsupportedKV("vLLM's prefix caching is off, and kvtier extends it; leave --no-enable-prefix-caching out")
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedKV("pipeline parallelism is not supported; use --tensor-parallel-size")
    if getattr(parallel, "nnodes", 1) > 1:
        raise UnsupportedKV("an engine over several hosts is not supported; kvtier is where all its ranks are")
    external = str(getattr(parallel, "distributed_executor_backend", "")) == "external_launcher"
    if external and parallel.tensor_parallel_size > 1:
        raise UnsupportedKV(
            "ranks that are launched externally each have a scheduler of their own, which must all decide alike, and "
            "what is found depends on time; let vLLM start its ranks itself (mp or ray)"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedKV(f"context parallelism is not supported; leave --{name.replace('_', '-')} out")
    if speculative is not None and speculative.method not in DRAFTLESS:
        raise UnsupportedKV(
            f"speculation by {speculative.method!r} keeps KV of a draft model, in which a token's depends on the next "
            "one; use ngram or suffix, or none"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedKV(
            "KV scales that are calculated at run time differ from engine to engine; use a checkpoint's"
        )


def _refuse_windows(specs: list[Any], block_tokens: int, load: str) -> None:
    windows = [spec.sliding_window for spec in specs if type(spec).__name__ == WINDOW]
    if windows and min(windows) < block_tokens:
        raise UnsupportedKV(
            f"the model has layers with a window of {min(windows)} tokens, and a block has {block_tokens}: of some it "
            "is never whole; make block_tokens smaller"
        )
    if windows and load == "sync":
        raise ConfigError("load is 'sync', which vLLM does not allow for models with sliding windows; leave it out")


def _layers(kv: Any) -> list[tuple[str, int, Any]]:
    """Name, group and specification of each layer."""
    found = []
    for number, group in enumerate(kv.kv_cache_groups):
        each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        found += [(name, number, each[name] if each else group.kv_cache_spec) for name in group.layer_names]
    return found


def _numbers(name: str) -> tuple[tuple[int, ...], str]:
    """What a layer is sorted by."""
    return tuple(int(part) for part in name.split(".") if part.isdigit()), name


def _shape(spec: Any) -> tuple[int, int, int, str, int]:
    dtype = str(spec.dtype).removeprefix("torch.")
    dims = spec.head_size, int(spec.head_size_v)
    if spec.state_content_size_bytes != sum(dims) * spec.dtype.itemsize or spec.tokens_per_state != 1:
        raise UnsupportedKV(f"vLLM keeps more than K and V in its pages ({spec}); use another --kv-cache-dtype")
    return spec.num_kv_heads, *dims, dtype, spec.block_size


def _spec(block: int, layers: int, heads: int, dims: tuple[int, int], dtype: str, *, mla: bool) -> KVSpec:
    if dtype not in ITEMSIZE:  # one byte an element: two of them are one of bfloat16's, and nobody looks inside
        if any(dim % 2 for dim in dims):
            raise UnsupportedKV(f"heads of {dims} bytes cannot be stored; use another --kv-cache-dtype")
        dims, dtype = (dims[0] // 2, dims[1] // 2), "bfloat16"
    return KVSpec(layers, heads, dims[0], dtype, v_head_dim=0 if mla else dims[1], block_tokens=block, mla=mla)


def _layout(config: Any, kv: Any, page: int, head_dim: int, spec: Any, *, cpu: bool) -> str:
    """What is inside a page, for the key."""
    if not cpu:
        return "canonical" if spec.dtype.itemsize > 1 else "opaque:vllm/bytes"
    import torch

    order = getattr(kv, "kv_cache_layout", None) or getattr(config.cache_config, "kv_cache_layout", None) or "LBHNC"
    name = _distribution()
    kernel = f"{torch.backends.cpu.get_cpu_capability()}/{_isa(config, page, head_dim)}"
    return f"opaque:{name}/{importlib.metadata.version(name)}/{kernel}/{order}/{page}"


def _isa(config: Any, page: int, head_dim: int) -> str:
    """Which of its packings vLLM's CPU attention uses."""
    from vllm.v1.attention.backends import cpu_attn

    cache = config.cache_config.cache_dtype
    try:
        return str(cpu_attn._get_attn_isa(config.model_config.dtype, page, head_dim, cache))  # noqa: SLF001
    except (AttributeError, TypeError):  # not a public function: another release has another one
        return "any"


@functools.cache
def _distribution() -> str:
    """The name that vLLM was installed under."""
    names = importlib.metadata.packages_distributions().get("vllm") or ["vllm"]
    return names[0]


def _platform() -> str:
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if kind not in ("cpu", "cuda"):
        raise UnsupportedKV(f"KV on {kind} is not supported; kvtier stores that of CPUs and of CUDA and ROCm GPUs")
    return kind


def _identity(config: Any) -> dict[str, str]:
    """What of an engine changes the KV, besides shape, weights and adapter."""
    model = config.model_config
    found = {"config": config_digest(model.hf_config), "dtype": str(model.dtype).removeprefix("torch.")}
    if getattr(model, "quantization", None):
        found["quantization"] = str(model.quantization)
    if str(config.load_config.load_format) == "dummy":
        found["weights"] = f"dummy/{model.seed}"
    rope = str(getattr(model.hf_config, "rope_parameters", None) or getattr(model.hf_config, "rope_scaling", None))
    if any(kind in rope for kind in STRETCHED):
        found["max_model_len"] = str(model.max_model_len)
    return {f"vllm.{name}": value for name, value in found.items()}
