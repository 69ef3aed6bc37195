"""SGLang's storage side as it was released, without the engine: its controller, its threads, its pools in host memory.

The wheel's own modules run: HybridCacheController, with which the engine runs every model, StorageBackendFactory,
HostPoolGroup, MHATokenToKVPoolHost, MLATokenToKVPoolHost and what they import. What is replaced needs a GPU or
dependencies of gigabytes, and nothing here calls it: device kernels and pools, the tree, the server's arguments, probes
of the platform. Its hash of pages, which is compiled when it is first called, is here the same chain in Python.
"""

from __future__ import annotations

import importlib.util
import struct
import sys
import threading
import types
from hashlib import sha256
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch

spec = importlib.util.find_spec("sglang")
if spec is None:
    pytest.skip("no release of SGLang is installed", allow_module_level=True)

PACKAGES = ("", ".srt", ".srt.mem_cache", ".srt.mem_cache.hybrid_cache", ".srt.managers")
"""Their `__init__`s pull in the whole engine."""
ABSENT = (
    ".kernels.ops.kvcache",
    ".kernels.ops.kvcache.hicache",
    ".kernels.ops.kvcache.hisparse",
    ".kernels.ops.kvcache.mla_buffer",
    ".srt.distributed",
    ".srt.distributed.parallel_state",
    ".srt.layers",
    ".srt.layers.dcp",
    ".srt.layers.dcp.layout",
    ".srt.layers.dp_attention",
    ".srt.mem_cache.allocator",
    ".srt.mem_cache.allocator.page_interleave",
    ".srt.mem_cache.base_prefix_cache",
    ".srt.mem_cache.deepseek_v4_memory_pool",
    ".srt.mem_cache.events",
    ".srt.mem_cache.l2_transfer",
    ".srt.mem_cache.memory_pool",
    ".srt.mem_cache.page_interleave",
    ".srt.mem_cache.page_interleave_pool",
    ".srt.mem_cache.pool_host.page_interleave",
    ".srt.mem_cache.pool_host.unified",
    ".srt.mem_cache.radix_cache",
    ".srt.platforms",
    ".srt.utils",
)


class Absent(types.ModuleType):
    """Whatever is imported from it is a class that nothing is an instance of; `is_cuda()` and such are false."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("is_"):
            return lambda *_: False
        made = type(name, (), {"__init__": lambda *_args, **_kwargs: None})
        setattr(self, name, made)
        return made


def _replace() -> None:
    root = Path(spec.origin).parent
    for name in PACKAGES:
        module = types.ModuleType(f"sglang{name}")
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[module.__name__] = module
    for name in ABSENT:
        sys.modules[f"sglang{name}"] = Absent(f"sglang{name}")
    nothing = types.SimpleNamespace(hicache_device_kernels=False)
    events = types.SimpleNamespace(Event=threading.Event)
    sys.modules["sglang.srt.utils"].get_device_module = lambda: events
    sys.modules["sglang.srt.platforms"].current_platform = types.SimpleNamespace(capabilities=nothing)


if "sglang.srt.managers.cache_controller" not in sys.modules:
    _replace()

from sglang.srt.managers import cache_controller  # noqa: E402
from sglang.srt.mem_cache import utils  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import PoolName  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: E402
from sglang.srt.mem_cache.pool_host import base  # noqa: E402
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402

LAYERS, HEADS, DIM, LATENT, PAGE, TOKENS = 3, 2, 8, 24, 16, 512
PATIENCE = 30.0
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def _hash(tokens: list[int], prior: bytes | None, page: int) -> list[str]:
    """Hex names of whole pages, each over its tokens and the name before."""
    names, digest = [], prior or b""
    for at in range(0, len(tokens) // page * page, page):
        digest = sha256(digest + struct.pack(f"<{page}I", *tokens[at : at + page])).digest()
        names.append(digest.hex())
    return names


utils.get_native_hash = _hash
# It keeps 10 GB of the machine free, which small ones do not have.
base.host_memory_budget_bytes = lambda requested: 2 * requested


def pool_of(kind: str, layout: str, *, page: int = PAGE, dtype: torch.dtype = torch.bfloat16) -> Any:
    """One of SGLang's host pools, in plain memory."""
    common = {"page_size": page, "dtype": dtype, "device": torch.device("cpu")}
    options = {"pin_memory": False, "device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": LAYERS}
    if kind == "mha":
        k, v = ([torch.zeros(TOKENS, HEADS, DIM, dtype=dtype) for _ in range(LAYERS)] for _ in "kv")
        buffers = KVBuffers(
            k=tuple(k), v=tuple(v), k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD
        )
        info = MHABufferInfo(buffers=buffers, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, **common)
        return MHATokenToKVPoolHost(info, 2.0, 0, page, layout, **options)
    latents = [torch.zeros(TOKENS, 1, LATENT, dtype=dtype) for _ in range(LAYERS)]
    info = MLABufferInfo(
        buffers=tuple(latents),
        data_ptrs=_pointers(latents),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        kv_lora_rank=LATENT - 8,
        qk_rope_head_dim=8,
        kv_cache_dim=LATENT,
        **common,
    )
    return MLATokenToKVPoolHost(info, 2.0, 0, page, layout, target_layer_num=LAYERS, **options)


def _pointers(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


class Engine:
    """One rank of an engine: SGLang's controller over one of its host pools, with kvtier behind it."""

    def __init__(
        self, socket: Path | str, pool: Any, *, v1: int = 1, tp: tuple[int, int] = (0, 1), **extra: Any
    ) -> None:
        self.pool = pool
        mla = isinstance(pool, MLATokenToKVPoolHost)
        device = cache_controller.MLATokenToKVPool() if mla else types.SimpleNamespace()
        device.device, device.layer_num = "cpu", LAYERS
        device.register_layer_transfer_counter = lambda _counter: None
        widths = {"tp_rank": tp[0], "tp_size": tp[1], "pp_rank": 0, "pp_size": 1}
        parallel = types.SimpleNamespace(**widths, attn_dcp_size=1, attn_dcp_rank=0)
        cache_controller.get_parallel = lambda: parallel
        config = {"backend_name": "kvtier", "module_path": "kvtier.connectors.sglang", "class_name": "KVTierHiCache"}
        config |= {"interface_v1": v1, "target": str(socket), "revision": "r1", **extra}
        group = HostPoolGroup([PoolEntry(PoolName.KV, pool, device, lambda layer: layer, is_primary_index_anchor=True)])
        self.controller = HybridCacheController(
            types.SimpleNamespace(get_kvcache=lambda: device),
            group,
            pool.page_size,
            None,
            threading.Event(),
            storage_backend="dynamic",
            prefetch_threshold=pool.page_size,
            model_name=config.pop("model_name", "llama"),
            storage_backend_extra_config=config,
        )
        self.backend = self.controller.storage_backend

    def names(self, tokens: list[int]) -> list[str]:
        return utils.get_storage_hash_str(tokens, None, page_size=self.pool.page_size)

    def backup(self, tokens: list[int], pages: list[torch.Tensor]) -> int:
        """Put flat pages into the pool and let SGLang store them; how many tokens it says are stored."""
        pool = self.pool
        indices = pool.alloc(len(pages) * pool.page_size)
        for i, page in enumerate(pages):
            pool.set_from_flat_data_page(int(indices[i * pool.page_size]), page)
        self.controller.write_storage(indices, tokens, self.names(tokens), prefix_keys=[])
        done = self.controller.ack_backup_queue.get(timeout=PATIENCE)
        pool.free(indices)
        return int(done.completed_tokens)

    def prefetch(self, tokens: list[int]) -> tuple[int, list[torch.Tensor]]:
        """Let SGLang look for a prompt and load it: how many tokens are hits, and the flat pages that were loaded."""
        controller, pool = self.controller, self.pool
        controller.prefetch(types.SimpleNamespace(rid="r"), tokens, prefix_keys=[])
        found = controller.prefetch_hit_queue.get(timeout=PATIENCE)
        if not found.storage_hit_count:
            return 0, []
        found.host_indices = pool.alloc(found.storage_hit_count)
        controller.prefetch_buffer.put(found)
        completed = _completed(controller.ack_prefetch_queue)
        pages = [pool.get_data_page(int(found.host_indices[at])).clone() for at in range(0, completed, pool.page_size)]
        pool.free(found.host_indices)
        return found.storage_hit_count, pages

    def close(self) -> None:
        if self.controller.enable_storage:
            self.controller.detach_storage_backend()


def _completed(acks: Queue) -> int:
    tokens = 0
    while True:
        ack = acks.get(timeout=PATIENCE)
        if ack.completed_req:
            return tokens
        tokens = ack.completed_tokens if ack.completed_tokens is not None else tokens


def pages_of(pool: Any, count: int, seed: int = 0) -> list[torch.Tensor]:
    """Flat pages with any bytes."""
    page = pool.get_dummy_flat_data_page()
    made = np.random.default_rng(seed).integers(0, 256, (count, page.nbytes), np.uint8)
    return [torch.from_numpy(each).view(page.dtype) for each in made]


def digest(pages: list[torch.Tensor]) -> str:
    """SHA-256 of the bytes of all pages."""
    return sha256(b"".join(page.view(torch.uint8).numpy().tobytes() for page in pages)).hexdigest()
