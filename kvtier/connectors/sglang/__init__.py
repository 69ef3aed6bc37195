"""kvtier for SGLang: the third level of its hierarchical cache (HiCache), by its dynamic storage backend.

    hicache   KVTierHiCache: SGLang's `HiCacheStorage`, zero-copy (v1, v2) and page by page
    shelf     the pages of one host pool in the cache, as `kvtier.client.rows`
    pools     SGLang's host pools: where their pages are, and how their bytes are meant
    options   what a user may say in --hicache-storage-backend-extra-config
    stats     what was moved, for SGLang's metrics

SGLang keeps pages of KV in host memory (its second level), names each by a hash over all tokens before it, and asks a
storage backend for what is missing there. A page is a row of bytes to kvtier: copied once each way, between SGLang's
pinned host pool and the mapped arena. Everything that decides what the bytes mean is in the keyspace: release of
SGLang, kind and layout of the pool, page size, dtype, layers, ranks.

One copy serves all tensor-parallel ranks of an MLA model. What fails on kvtier's side is a miss, or a page that is not
stored; an exception is raised only at the start, for what cannot work.
"""

from kvtier.connectors.sglang.hicache import KVTierHiCache

__all__ = ["KVTierHiCache"]
