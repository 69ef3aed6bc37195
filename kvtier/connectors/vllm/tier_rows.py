"""vLLM's offloaded chunks as rows, and what names them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

import kvtier
from kvtier.client.rows import RowMemory, Rows
from kvtier.connectors.link import Link, Opened

CANONICAL = "canonical"


class TierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a user may say of the tier, beside its type; all but `revision` have a default."""

    revision: Annotated[
        str, Meta(min_length=1, description="the weights' revision in keys: another one for whatever changes the KV")
    ]
    target: Annotated[
        str | None, Meta(description="the host's door.sock, a kvtier.toml, or grpcs://host:port; default: this host's")
    ] = None
    token: Annotated[str, Meta(description="of another host, for grpcs://; default: $KVTIER_TOKEN")] = ""
    ca: Annotated[str | None, Meta(description="certificates (PEM) of who may vouch for that host")] = None
    model: Annotated[str, Meta(description="the model's name in keys; default: its name, or its folder's")] = ""
    wait: Annotated[
        float, Meta(ge=0, le=60, description="seconds that a load may wait for chunks on their way to memory")
    ] = 1.0
    ttl: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="seconds after which chunks expire; null for never")
    ] = None
    tenant: Annotated[str, Meta(description="salt: who has another one shares nothing")] = ""
    threads: Annotated[int, Meta(ge=1, le=64, description="threads that copy the chunks of one load")] = 1

    def connect(self) -> kvtier.Cache:
        """Open a session.

        Raises:
            KVTierError: there is no host, or it does not let us in.
        """
        return kvtier.connect(self.target, threads=self.threads, token=self.token, ca=self.ca)


class TierRows:
    """The chunks of one engine's primary tier in the cache. Thread-safe.

    Args:
        options: of the tier.
        spec: vLLM's `OffloadingSpec`.
        chunks: vLLM's primary tier: bytes, `[chunks, bytes of one]`. It is not kept: vLLM releases it after `shutdown`.
        link: to the host.

    Raises:
        ConfigError: chunks of an odd number of bytes.
    """

    def __init__(self, options: TierOptions, spec: Any, chunks: memoryview, link: Link) -> None:
        self._wait = options.wait
        held = RowMemory.of(np.asarray(chunks).view(np.uint8))
        self.memory = RowMemory(held.pieces, held.strides, held.piece_nbytes, held.count, None)
        self.nbytes = held.piece_nbytes
        self.spec = self.memory.prepare(int(spec.tokens_per_block[0]) * int(spec.blocks_per_chunk))
        self._identity = _identity(options, spec.config, int(spec.blocks_per_chunk))
        self._rows = Opened(link, lambda cache: Rows(cache, self.spec, **self._identity))

    @property
    def rows(self) -> Rows | None:
        """The keyspace; None while the host is not there, or refuses it."""
        return self._rows.get()

    def in_order(self, keys: Iterable[bytes], request: Any) -> list[list[bytes]]:
        """Keys of each of vLLM's groups, in the order of the sequence as far as the request knows it."""
        groups: dict[bytes, list[bytes]] = {}
        for key in keys:
            groups.setdefault(key[-4:], []).append(key)
        ends = _ends(request)
        for group in groups.values():
            group.sort(key=lambda key: ends.get(key, 0))
        return list(groups.values())

    def before(self, key: bytes, request: Any) -> list[bytes]:
        """The chunk before one, in its group; empty when the request knows of none."""
        ends = _ends(request)
        earlier = [other for other, end in ends.items() if other[-4:] == key[-4:] and end < ends.get(key, 0)]
        return [max(earlier, key=ends.__getitem__)] if earlier else []


def _ends(request: Any) -> dict[bytes, int]:
    """Where in its sequence each of a request's chunks ends; vLLM has no other name for all of them."""
    ends: dict[bytes, int] = getattr(request, "_offload_key_positions", {})
    return ends


def _identity(options: TierOptions, config: Any, blocks: int) -> dict[str, Any]:
    """What names an engine's chunks, besides vLLM's hashes."""
    parallel = config.parallel
    sizes = {name: getattr(parallel, name) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")}
    shape = {
        "groups": [[group.tokens_per_block, *group.layer_names] for group in config.groups],
        "worker_nbytes": config.worker_kv_bytes_per_block,
        "blocks": blocks,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "replicated": config.replicated_layout,
        **sizes,
    }
    name = str(config.model.name)
    model = options.model or (Path(name).resolve().name if Path(name).exists() else name)
    order = CANONICAL if config.canonical_layout else config.kv_cache_layout
    return {
        "model": model,
        "revision": options.revision,
        "layout": f"opaque:{_engine()}/offload/{order}/{config.model.dtype}",
        "overrides": {"vllm.chunks": hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()},
        "ttl": options.ttl,
        "tenant": options.tenant,
    }


def _engine() -> str:
    """Release of vLLM and what its kernels run on: they decide what is inside a page."""
    from vllm.platforms import current_platform

    names: Sequence[str] = importlib.metadata.packages_distributions().get("vllm") or ["vllm"]
    kind = str(current_platform.device_type)
    if kind == "cpu":
        import torch

        kind += f"-{torch.backends.cpu.get_cpu_capability()}"
    return f"{names[0]}/{importlib.metadata.version(names[0])}/{kind}"
