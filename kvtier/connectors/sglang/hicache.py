"""The storage backend of SGLang's hierarchical cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

import kvtier
from kvtier.client.rows import RowMemory
from kvtier.connectors.link import Link
from kvtier.connectors.sglang.options import Options
from kvtier.connectors.sglang.pools import HostPool
from kvtier.connectors.sglang.shelf import Shelf
from kvtier.connectors.sglang.stats import Stats
from kvtier.errors import ConfigError, KVTierError, UsageError

T = TypeVar("T")
log = logging.getLogger("sglang.kvtier")
KV = str(PoolName.KV)
BESIDE = frozenset((str(PoolName.INDEXER), str(PoolName.DRAFT), str(PoolName.DRAFT_INDEXER)))
"""Further pools that have a page wherever the KV has one."""


class KVTierHiCache(HiCacheStorage):  # type: ignore[misc]
    """kvtier as the third level of SGLang's cache: `--hicache-storage-backend dynamic`.

    SGLang calls it from threads of its own. A host that is gone is a miss, or False; an exception is only raised at the
    start, for a configuration that cannot work. Each page is counted once on the host: where SGLang asks whether it is
    there, and not again where it loads it.

    Args:
        storage_config: `HiCacheStorageConfig`; `extra_config` has `Options` besides SGLang's own names.
        kwargs: nothing.

    Raises:
        ConfigError: a name that there is not, a model without a name, or parallelism that is not supported.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config, self._options = storage_config, Options.of(storage_config.extra_config)
        self._flat = not (storage_config.extra_config or {}).get("interface_v1", 0)
        if storage_config.dcp_size > 1:
            raise ConfigError("decode context parallelism is not supported; leave --dcp-size out")
        if not (self._options.model or storage_config.model_name):
            raise ConfigError("the model has no name; add model to --hicache-storage-backend-extra-config")
        self._shelves: dict[str, Shelf] = {}
        self._stats = Stats()
        options = self._options
        self._link = Link(
            lambda: kvtier.connect(options.target, threads=options.threads, token=options.token, ca=options.ca),
            lambda what: log.warning("kvtier: %s", what),
        )

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's pool of KV pages.

        Raises:
            ConfigError: its pages cannot be stored.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._shelves[KV] = self._shelf(KV, mem_pool_host, flat=self._flat)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A further pool, with pages of the same names.

        Raises:
            ConfigError: its pages cannot be stored.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name == KV:
            if KV not in self._shelves:
                self.register_mem_pool_host(host_pool)
            return
        if name not in BESIDE:
            raise ConfigError(
                f"the model keeps state in a pool {name!r}, of which only some pages exist; kvtier stores models whose "
                "layers all have full attention"
            )
        self._shelves[name] = self._shelf(name, host_pool, flat=False)

    def _shelf(self, name: str, pool: Any, *, flat: bool) -> Shelf:
        config, options = self._config, self._options
        if getattr(pool, "_layer_shard_enabled", False):
            raise ConfigError("layers of one cache spread over ranks are not supported")
        host_pool = HostPool.of(pool, flat=flat, dtype=options.kv_cache_dtype)
        alike = config.is_mla_model and not host_pool.sharded
        places = {
            "sglang.pool": name,
            "sglang.pp": f"{config.pp_rank}/{config.pp_size}",
            "sglang.cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
        }
        identity = {
            "model": options.model or config.model_name,
            "revision": options.revision,
            "ttl": options.ttl,
            "tenant": options.tenant,
            "tp_size": config.tp_size,
            "rank": 0 if alike else config.tp_rank,
            "overrides": places,
        }
        return Shelf(self._link, host_pool, wait=options.wait, identity=identity)

    # Lookups

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        return self._held(KV, keys)

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        pages = self._held(KV, keys)
        hits = {PoolName.KV: pages} if pages else {}
        for transfer in pool_transfers or ():
            everywhere = transfer.hit_policy is PoolHitPolicy.ALL_PAGES
            held = self._held(str(transfer.name), keys[:pages]) if everywhere else 0
            if held:
                hits[transfer.name] = held
            pages = min(pages, held)
        return PoolTransferResult(pages, hits, list(range(1, pages + 1)))

    def _held(self, name: str, keys: Sequence[str]) -> int:
        shelf = self._shelves.get(name)
        return self._or(lambda: shelf.held(keys), 0) if shelf is not None else 0

    # Pages where they lie in a pool

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._get(KV, keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._set(KV, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._get(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            each.name: self._set(str(each.name), each.keys or [], each.host_indices, extra_info) for each in transfers
        }

    def _get(self, name: str, keys: Sequence[str], indices: Any) -> list[bool]:
        def load() -> list[bool]:
            shelf, memory = self._zero_copy(name)
            return shelf.load(keys, memory, shelf.pool.rows(indices, len(keys)))

        return self._loaded(name, keys, load)

    def _set(self, name: str, keys: Sequence[str], indices: Any, extra_info: Any) -> list[bool]:
        def save() -> bool:
            shelf, memory = self._zero_copy(name)
            return shelf.save(keys, memory, shelf.pool.rows(indices, len(keys)), _before(extra_info))

        return [self._saved(name, keys, save)] * len(keys)

    def _zero_copy(self, name: str) -> tuple[Shelf, RowMemory]:
        shelf = self._shelves.get(name)
        if shelf is None or shelf.pool.memory is None:
            raise UsageError(f"no pool {name!r} was registered for zero copy; set interface_v1: 1")
        return shelf, shelf.pool.memory

    # Pages one by one

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        targets = list(target_locations or ())

        def load() -> list[bool]:
            shelf = self._one_by_one(keys, targets)
            return shelf.load(keys, *shelf.pool.flat(targets))

        found = self._loaded(KV, keys, load)
        return [target if there else None for there, target in zip(found, targets or found, strict=False)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        pages = [page.contiguous() if hasattr(page, "contiguous") else page for page in values or ()]

        def save() -> bool:
            shelf = self._one_by_one(keys, pages)
            return shelf.save(keys, *shelf.pool.flat(pages), ())

        return self._saved(KV, keys, save)

    def _one_by_one(self, keys: Sequence[str], pages: Sequence[Any]) -> Shelf:
        shelf = self._shelves.get(KV)
        if shelf is None or shelf.pool.memory is not None:
            raise UsageError("no pool was registered for pages one by one; set interface_v1: 0")
        if len(pages) != len(keys) or any(page is None for page in pages):
            raise UsageError(f"{len(pages)} tensors for {len(keys)} pages; give one for each")
        return shelf

    # The whole

    def clear(self) -> bool:
        """Drop what engines like this one stored, of all ranks.

        Raises:
            SessionError: the host did not answer, so it may be there still.
        """
        for shelf in self._shelves.values():
            shelf.clear()
        return True

    def get_stats(self) -> Stats:
        """What was loaded and stored since the last call, as SGLang's collector reads it."""
        return self._stats.take()

    def close(self) -> None:
        """End the session; idempotent."""
        self._link.close()

    # Inside

    def _loaded(self, name: str, keys: Sequence[str], load: Callable[[], list[bool]]) -> list[bool]:
        began = time.perf_counter()
        found = self._or(load, [False] * len(keys)) if keys else []
        self._stats.loaded(sum(found), self._nbytes(name), time.perf_counter() - began)
        return found

    def _saved(self, name: str, keys: Sequence[str], save: Callable[[], bool]) -> bool:
        began = time.perf_counter()
        whole = not keys or self._or(save, False)  # noqa: FBT003
        self._stats.saved(len(keys) if whole else 0, self._nbytes(name), time.perf_counter() - began)
        return whole

    def _nbytes(self, name: str) -> int:
        shelf = self._shelves.get(name)
        return shelf.pool.nbytes if shelf is not None else 0

    def _or(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except (KVTierError, UsageError) as exc:
            self._link.say(f"{exc}")
            return otherwise


def _before(extra_info: Any) -> Sequence[str]:
    return getattr(extra_info, "prefix_keys", None) or ()
