"""A secondary tier of vLLM's offloading (`TieringOffloadingSpec`)."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingCounterMetadata, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtier.client.save import Saved
from kvtier.connectors.link import Link
from kvtier.connectors.options import read
from kvtier.connectors.vllm.tier_lookup import Lookups, Pins
from kvtier.connectors.vllm.tier_rows import TierOptions, TierRows
from kvtier.errors import KVTierError, UsageError

log = logging.getLogger("vllm.kvtier")
LOADERS = 4
REASONS = "vllm:kv_offload_kvtier_reasons"
"""Counter of what was not stored or not loaded, by reason."""


class KVTierSecondaryTier(SecondaryTierManager):  # type: ignore[misc]
    """kvtier behind vLLM's primary tier: `{"type": "KVTierSecondaryTier", "module_path": "kvtier.connectors.vllm"}`.

    All of vLLM's calls come on the scheduler's thread, and none waits: lookups, loads and stores run in the background.
    What was promised is leased until it is loaded, or until its request ends.

    Args:
        offloading_spec: vLLM's.
        primary_kv_view: its primary tier, `[chunks, bytes of one]`.
        tier_type: its name of this tier.
        backpressure_detector: its.
        locality: "LOCAL" or "REMOTE", for vLLM's events and filters.
        **given: `TierOptions`.

    Raises:
        ConfigError: an option that there is not, or no revision.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **given: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if locality is not None:
            from vllm.v1.kv_offload.base import Locality

            self.locality = Locality(locality)
        options = read(TierOptions, given, f"the secondary tier {tier_type}")
        self._wait = options.wait
        self._link = Link(options.connect, lambda what: log.warning("kvtier: %s", what))
        self._chunks = TierRows(options, offloading_spec, primary_kv_view, self._link)
        self._pins = Pins()
        self._lookups = Lookups(tier_type, self._chunks, self._pins, options.wait)
        self._threads = ThreadPoolExecutor(LOADERS, "kvtier-tier")
        self._done: SimpleQueue[tuple[JobResult, tuple[bytes, ...]]] = SimpleQueue()
        self._jobs, self._ended = 0, threading.Condition()
        self._counters: Counter[str] = Counter()
        self._told: Counter[str] = Counter()

    # Requests

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._pins.begin(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)
        self._pins.end(req_context.req_id)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()
        self._pins.sweep()

    # Jobs

    def submit_store(self, job_metadata: Any) -> None:
        job, began = job_metadata, time.monotonic()

        def ended(refused: str) -> None:
            if refused:
                self._counters[f"store_{refused}"] += 1
            nbytes = 0 if refused else len(job.keys) * self._chunks.nbytes
            self._end(JobResult(job.job_id, not refused, None, time.monotonic() - began, nbytes))

        self._begin()
        try:
            save = self._save(job)
        except (KVTierError, UsageError) as exc:
            ended(type(exc).__name__)
            return
        if save is None:
            ended("unavailable" if job.keys else "")
            return
        save.add_done_callback(lambda done: ended(_why(done)))

    def _save(self, job: Any) -> Future[Saved] | None:
        rows = self._chunks.rows
        if rows is None or not job.keys:
            return None
        where = dict(zip(job.keys, job.chunk_ids.tolist(), strict=True))
        keys = [key for group in self._chunks.in_order(where, job.req_context) for key in group]
        before = self._chunks.before(keys[0], job.req_context)
        view = self._chunks.memory.view(self._chunks.spec, [where[key] for key in keys])
        return rows.save(rows.chain([*before, *keys]), view, start=len(before))

    def submit_load(self, job_metadata: Any) -> None:
        pins = self._pins.take(job_metadata.req_context.req_id)
        self._begin()
        self._threads.submit(self._load, job_metadata, pins)

    def _load(self, job: Any, pins: list[Any]) -> None:
        began, keys = time.monotonic(), tuple(job.keys)
        found = [False] * len(keys)
        try:
            rows = self._chunks.rows
            if rows is not None:
                view = self._chunks.memory.view(self._chunks.spec, job.chunk_ids)
                found = rows.load(rows.chain(keys), view, wait=self._wait, again=True).tolist()
        except (KVTierError, UsageError) as exc:
            self._link.say(f"{exc}")
        finally:
            for pin in pins:
                pin.close()
            good = tuple(key for key, there in zip(keys, found, strict=True) if there)
            lost = tuple(key for key, there in zip(keys, found, strict=True) if not there)
            self._counters["load_lost"] += len(lost)
            seconds, nbytes = time.monotonic() - began, len(good) * self._chunks.nbytes
            self._end(JobResult(job.job_id, not lost, good or None, seconds, nbytes), lost)

    def _begin(self) -> None:
        with self._ended:
            self._jobs += 1

    def _end(self, result: JobResult, lost: tuple[bytes, ...] = ()) -> None:
        with self._ended:
            self._done.put((result, lost))
            self._jobs -= 1
            self._ended.notify_all()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results: list[JobResult] = []
        while True:
            try:
                result, lost = self._done.get_nowait()
            except Empty:
                return results
            self._lookups.mark_miss(lost)  # else the next step would ask for them again
            results.append(result)

    def drain_jobs(self) -> None:
        with self._ended:
            self._ended.wait_for(lambda: not self._jobs)

    # The whole

    def shutdown(self) -> None:
        """End what is under way; nobody touches the primary tier afterwards."""
        self._lookups.shutdown()
        self._threads.shutdown(wait=True)
        self._pins.close()
        self._link.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """See `SecondaryTierManager`."""
        what = "Number of jobs, chunks and calls that kvtier did not serve, labeled by reason."
        return {REASONS: OffloadingCounterMetadata(documentation=what, labelnames=("reason",))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        cache = self._link.cache
        now = Counter(dict(self._counters))
        now.update(dict(cache.counters) if cache is not None else {})
        new, self._told = now - self._told, now
        if not new:
            return None
        stats = OffloadingConnectorStats()
        for reason, count in new.items():
            stats.increase_counter(REASONS, count, (reason,))
        return stats


def _why(done: Future[Saved]) -> str:
    """Why a save did not store everything; empty when it did."""
    failed = done.exception()
    return done.result().refused if failed is None else type(failed).__name__
