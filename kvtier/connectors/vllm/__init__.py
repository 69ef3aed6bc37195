"""kvtier for vLLM 0.30 and later: a connector, and a secondary tier of its offloading.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvtier.connectors.vllm"}'

    connector    vLLM's interface: one object in the scheduler's process, one in each worker's
      options      what a user may say
      stored       which KV can be stored, and what names it; `extra` for single requests, `weights` for files
      link         the session with the host, which may come and go
    scheduler    what is promised and what is saved; `sequence` is one request
      asking       which requests are looked up; `lookup` finds and leases, on threads
      saving       what is saved, out of pages that are `held` meanwhile; `speed` is the engine's
    worker       loads and saves; `transfer` is one of them, `pages` how the engine's tensors are seen
    messages     what the two tell each other
    stats        counters in vLLM's logs and metrics
    tier         KVTierSecondaryTier, for TieringOffloadingSpec

The scheduler's side never waits for the host: a lookup runs on a thread from when its request arrives, and a step that
does not have its answer yet asks again in the next one. What is promised is leased from then until every rank has
loaded it. A worker looks it up again, uncounted, with a session of its own: which tier's memory it can read is its own
affair. What it could not load after all it reports, and vLLM computes it, whatever `kv_load_failure_policy` says.

Blocks are saved when all their tokens are known and computed, on a thread, straight from the engine's pages. These are
held by references of their own in vLLM's pool meanwhile, so that a request may end, or be aborted or preempted, at any
time. A save that is refused is tried again when the sequence has a block more.

On a GPU pages are read as K and V by their strides, and encoded and decoded there. On a CPU vLLM packs a page in its
own way: it is moved as it is (`opaque` in the key), and only under the plan raw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.connectors.vllm.connector import KVTierConnector
    from kvtier.connectors.vllm.tier import KVTierSecondaryTier

__all__ = ["KVTierConnector", "KVTierSecondaryTier"]


def __getattr__(name: str) -> Any:
    # Either needs the engine, and only one of its two plug-in points.
    if name == "KVTierConnector":
        from kvtier.connectors.vllm.connector import KVTierConnector

        return KVTierConnector
    if name == "KVTierSecondaryTier":
        from kvtier.connectors.vllm.tier import KVTierSecondaryTier

        return KVTierSecondaryTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
