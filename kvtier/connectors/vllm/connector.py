"""vLLM's connector interface."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics import cache_hit_source

from kvtier.codecs.registry import codec_for
from kvtier.connectors.vllm.link import Link
from kvtier.connectors.vllm.messages import Outcome, Step
from kvtier.connectors.vllm.options import Options
from kvtier.connectors.vllm.scheduler import SchedulerSide
from kvtier.connectors.vllm.stats import KVTierMetrics, KVTierStats
from kvtier.connectors.vllm.stored import Stored, stored
from kvtier.connectors.vllm.weights import revision_of
from kvtier.connectors.vllm.worker import WorkerSide
from kvtier.errors import ConfigError, KVTierError
from kvtier.tiers.base import TierNumber

log = logging.getLogger("vllm.kvtier")
STARTING = 10.0
"""Seconds that the engine's start waits for kernels and the weights' revision."""
_WORKERS: WeakValueDictionary[str, WorkerSide] = WeakValueDictionary()
"""Of this process, by the engine's name."""


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's side tells the workers."""

    step: Step


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker answers."""

    outcome: Outcome

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        return WorkerMetadata(self.outcome.merge(other.outcome))


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads prefixes that any engine has computed, and saves what this one computes; see the package.

    Raises:
        UnsupportedKV: the model, or how it is run, keeps KV that cannot be shared by prefix.
        ConfigError: `kv_connector_extra_config` cannot be right.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = Options.of(transfer.kv_connector_extra_config or {})
        described = stored(vllm_config, kv_cache_config, options)
        if options.load == "sync" and vllm_config.scheduler_config.async_scheduling:
            raise ConfigError("load is 'sync', and steps overlap; leave it out, or run with --no-async-scheduling")
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._link = Link(options)
        if role is KVConnectorRole.SCHEDULER:
            # vLLM reads this right after it has made the connector. What cannot be loaded is computed: no failure of a
            # cache is one of a request's.
            transfer.kv_load_failure_policy = "recompute"
            self._scheduler = SchedulerSide(
                described,
                options,
                ranks=vllm_config.parallel_config.world_size,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                link=self._link,
                revision=_revision(vllm_config, options, described),
                beside=partial(_WORKERS.get, transfer.engine_id) if _alone(vllm_config) else lambda: None,
            )
            _say(described)
        else:
            self._worker = WorkerSide(described, options, rank=_rank(vllm_config), link=self._link)
            _WORKERS[transfer.engine_id] = self._worker

    # Both sides

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        self._link.close()

    def get_kv_connector_stats(self) -> KVTierStats | None:
        side = self._scheduler or self._worker
        counted = side.drain() if side is not None else {}
        return KVTierStats(data=counted) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        return KVTierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        return KVTierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return Options.of(extra_config).load == "sync"

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._side.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._side.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._side.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        source = cache_hit_source.CacheHitSource
        kinds = {TierNumber.NVME: source.DISK, TierNumber.PEER: source.P2P}
        counted: dict[Any, int] = {}
        for tier, tokens in self._side.sources(request, num_external_tokens).items():
            kind = kinds.get(tier, source.HOST)
            counted[kind] = counted.get(kind, 0) + tokens
        return counted

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._side.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        answer = connector_output.kv_connector_worker_meta
        self._side.done(answer.outcome if isinstance(answer, WorkerMetadata) else None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._side.ended(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.pending

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.soon_free

    def reset_cache(self) -> bool:
        self._side.reset()
        return True

    # A worker's side

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._rank_side.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._rank_side.begin(self._get_connector_metadata().step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._rank_side.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: pages are held until they are saved, so there is no hurry while the model runs."""

    def wait_for_save(self) -> None:
        self._rank_side.finish(self._get_connector_metadata().step)

    def get_finished(self, finished_req_ids: Iterable[str]) -> tuple[set[str] | None, set[str] | None]:
        step = self._get_connector_metadata().step
        if not step.computes:  # of such steps vLLM 0.30 does not call `wait_for_save`
            self._rank_side.finish(step)
        return None, self._rank_side.received() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._rank_side.failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._rank_side.bad_pages()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        outcome = self._rank_side.outcome()
        return WorkerMetadata(outcome) if outcome else None

    @property
    def _side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise KVTierError("this is a worker's connector, and was asked what the scheduler's knows")
        return self._scheduler

    @property
    def _rank_side(self) -> WorkerSide:
        if self._worker is None:
            raise KVTierError("this is the scheduler's connector, and was asked what a worker's knows")
        return self._worker


def _alone(config: Any) -> bool:
    """Whether the engine has one worker only."""
    return int(config.parallel_config.world_size) == 1


def _rank(config: Any) -> int:
    rank = int(config.parallel_config.rank)
    return rank % int(config.parallel_config.tensor_parallel_size)


def _revision(config: Any, options: Options, described: Stored) -> Future[str]:
    """Find out the weights' revision, and compile the codec, in the background: both may take a while.

    The engine's start waits for it a little, so that the first requests of a short program are no misses.
    """
    model, known, tried = config.model_config, Future[str](), threading.Event()

    def find() -> None:
        try:
            codec_for(options.plan, described.spec)
            commit = getattr(model.hf_config, "_commit_hash", None)
            revision = options.revision or revision_of(str(model.model), commit)
        except Exception as exc:  # noqa: BLE001 - said, and requests are computed
            log.error("kvtier: %s; nothing is stored or loaded", exc)  # noqa: TRY400 - for a user, not for us
        else:
            log.info("kvtier: the weights are %s", revision)
            known.set_result(revision)
        finally:
            tried.set()

    threading.Thread(target=find, name="kvtier-revision", daemon=True).start()
    tried.wait(STARTING)
    return known


def _say(described: Stored) -> None:
    log.info(
        "kvtier: blocks of %d tokens, %d KiB in each of %d ranks, plan %s, layout %s",
        described.block_tokens,
        described.spec.block_nbytes >> 10,
        described.shards,
        dict(described.recipe.parts)["plan"],
        dict(described.recipe.parts)["layout"],
    )
