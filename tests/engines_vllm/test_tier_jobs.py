"""The tier as vLLM's manager drives it, without an engine."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob

with warnings.catch_warnings():  # vLLM's own
    warnings.simplefilter("ignore")
    from kvtier.connectors.vllm.tier import KVTierSecondaryTier

from tests.engines_vllm.host import Host, eventually

CHUNKS, NBYTES = 64, 4096
SIZES = {"world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
CONFIG = {
    "parallel": SimpleNamespace(**SIZES),
    "groups": [SimpleNamespace(tokens_per_block=16, layer_names=["0", "1"])],
    "worker_kv_bytes_per_block": NBYTES,
    "cache": SimpleNamespace(tokens_per_hash=16),
    "replicated_layout": False,
    "canonical_layout": False,
    "kv_cache_layout": "NHD",
    "model": SimpleNamespace(name="m", dtype="float32"),
}
SPEC = SimpleNamespace(tokens_per_block=[16], blocks_per_chunk=1, config=SimpleNamespace(**CONFIG))


class Manager:
    """What vLLM's does with a tier: jobs over its primary memory."""

    def __init__(self, target: Any, **options: Any) -> None:
        self.memory = np.random.default_rng(0).integers(0, 256, (CHUNKS, NBYTES), np.uint8)
        view = memoryview(self.memory)
        self.tier = KVTierSecondaryTier(
            SPEC, view, "1:KVTierSecondaryTier", target=str(target), revision="1", **options
        )
        self.jobs: dict[int, TransferJob] = {}

    def request(self, name: str, count: int) -> tuple[ReqContext, list[Any]]:
        """A request of so many chunks."""
        request, keys = ReqContext(name), [make_offload_key(b"%032d" % n, 0) for n in range(count)]
        for n, key in enumerate(keys):
            request.set_offload_key_position(key, 16 * (n + 1))
        self.tier.on_new_request(request)
        return request, keys

    def job(self, request: ReqContext, keys: list[Any], chunks: list[int], *, promotion: bool = False) -> None:
        job = TransferJob(len(self.jobs), keys, np.array(chunks, np.int32), promotion, request)
        self.jobs[job.job_id] = job
        (self.tier.submit_load if promotion else self.tier.submit_store)(job)

    def look(self, request: ReqContext, keys: list[Any]) -> list[LookupResult]:
        """Look up until the answers are there."""
        eventually(lambda: LookupResult.RETRY in self.step(request, keys), wanted=False)
        return self.step(request, keys)

    def step(self, request: ReqContext, keys: list[Any]) -> list[LookupResult]:
        found = [self.tier.lookup(key, request) for key in keys]
        self.tier.on_schedule_end(None)
        return found


@pytest.fixture
def manager(host: Host) -> Iterator[Manager]:
    manager = Manager(host.socket)
    yield manager
    manager.tier.shutdown()


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hurried")
def test_who_drains_its_jobs_has_all_their_results(manager):
    # vLLM forgets what its memory holds then, and its engine fails when a job is still open.
    for round_ in range(200):
        request, keys = manager.request(f"r{round_}", 3)
        manager.job(request, keys, [0, 1, 2])
        manager.tier.drain_jobs()
        assert [result.job_id for result in manager.tier.get_finished_jobs()] == [round_]


def test_what_is_stored_is_found_and_loaded(manager):
    request, keys = manager.request("a", 8)
    wanted = manager.memory[:8].copy()
    manager.job(request, keys, list(range(8)))
    manager.tier.drain_jobs()
    assert [result.success for result in manager.tier.get_finished_jobs()] == [True]
    assert manager.look(request, keys) == [LookupResult.HIT] * 8
    manager.job(request, keys, list(range(20, 28)), promotion=True)
    manager.tier.drain_jobs()
    (result,) = manager.tier.get_finished_jobs()
    assert result.success
    assert np.array_equal(manager.memory[20:28], wanted)


def test_a_job_of_nothing_is_done(manager):
    request, _ = manager.request("a", 0)
    manager.job(request, [], [])
    manager.job(request, [], [], promotion=True)
    manager.tier.drain_jobs()
    assert sorted(result.job_id for result in manager.tier.get_finished_jobs()) == [0, 1]
