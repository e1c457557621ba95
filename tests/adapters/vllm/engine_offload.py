"""vLLM's tiering on the CPU, for tests: copies in host memory in place of those of a GPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks at once."""

    def __init__(self, kv_caches: Any, region: Any, *, wrong: bool) -> None:
        self._region = region
        self._wrong = wrong
        self._pairs = []
        for one in kv_caches.tensors:
            tensor = one.tensor
            size = one.page_size_bytes
            flat = tensor.view(torch.int8).view(-1, size)
            self._pairs.append((flat, region.create_next_worker_view(size), size))
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host, size in self._pairs:
            for block, chunk in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                host[int(chunk), :size] = device[int(block), :size]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host, size in self._pairs:
            for chunk, block in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                device[int(block), :size] = 0 if self._wrong else host[int(chunk), :size]
        return self._end(job_id)

    def _end(self, job_id: int) -> bool:
        self._done.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None: ...

    def shutdown(self) -> None:
        self._pairs = []
        self._region.cleanup()


class CpuTiering(TieringOffloadingSpec):  # type: ignore[misc]
    """The same, but for the worker."""

    _made: HostCopies | None = None

    def get_worker(self, kv_caches: Any) -> HostCopies:
        if self._made is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            wrong = bool(self.extra_config.get("wrong", False))
            self._made = HostCopies(kv_caches, region, wrong=wrong)
        return self._made
