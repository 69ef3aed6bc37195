"""vLLM's tiered offloading on a CPU, for tests: the stock spec takes CUDA and XPU only.

All that is replaced is the worker that copies pages between the device and the primary tier; here both are in memory.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies pages in the worker's thread; one of vLLM's blocks is one chunk."""

    def __init__(self, spec: Any, caches: Any) -> None:
        self._region = SharedOffloadRegion(
            engine_id=spec._engine_id,
            num_chunks=spec.num_chunks,
            rank=spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self._pairs = [
            (each.tensor, self._region.create_next_worker_view(each.page_size_bytes)) for each in caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host in self._pairs:
            host[_rows(dst_spec)] = device[_rows(src_spec)]
        return self._finish(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host in self._pairs:
            device[_rows(dst_spec)] = host[_rows(src_spec)]
        return self._finish(job_id)

    def _finish(self, job_id: int) -> bool:
        self._done.append(TransferResult(job_id, True, 0, time.monotonic()))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """`TieringOffloadingSpec` with that worker."""

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            self._worker = CopyingWorker(self, kv_caches)
        return self._worker


def _rows(spec: Any) -> torch.Tensor:
    return torch.from_numpy(spec.block_ids).long()
