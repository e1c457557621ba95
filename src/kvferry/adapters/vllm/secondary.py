"""kvferry's storage behind vLLM's own host tier: a `SecondaryTierManager`.

"secondary_tiers": [{"type": "KVFerryTier", "module_path": "kvferry.adapters.vllm.secondary",
                     "storage": {"path": "/var/cache/kvferry"}}]
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import __version__ as vllm_version
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvferry.adapters.vllm.chunk_jobs import ChunkJobs
from kvferry.adapters.vllm.identity import weights_revision
from kvferry.cache import backend_options, resolved_config
from kvferry.errors import ConfigError, StorageError
from kvferry.storage import open_backend, try_backend

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["KVFerryTier"]

_DRAIN_SECONDS = 60.0
_CLOSE_SECONDS = 10.0


class KVFerryTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks of vLLM's host tier in one of kvferry's storage backends, checked when read.

    Args:
        offloading_spec, primary_kv_view, tier_type, backpressure_detector: vLLM's.
        storage: The section of kvferry's config.

    Raises:
        ConfigError: The section names no backend.
        StorageError: The backend cannot be opened, or does not do what it should.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        storage: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = resolved_config(None, {"storage": {"enabled": True, **(storage or {})}})
        if config.storage.target is None:
            raise ConfigError("storage.backend is none: name one, or leave this tier out")
        backend = open_backend(config.storage.target, **backend_options(config))
        result = try_backend(backend)
        if not result.ok:
            backend.close()
            raise StorageError(f"storage does not do what it should: {result.reason}")
        self._first_address = int(np.asarray(primary_kv_view).ctypes.data)
        self._jobs = ChunkJobs(
            backend,
            self.block_size_bytes,
            _prefix(offloading_spec),
            num_threads=config.storage.workers,
        )

    def lookup(self, key: Any, req_context: Any) -> LookupResult:  # noqa: ARG002
        """Whether storage has a chunk; RETRY while a thread looks."""
        found = self._jobs.has(bytes(key))
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def _addresses(self, job: Any) -> list[int]:
        return [self._first_address + int(at) * self.block_size_bytes for at in job.chunk_ids]

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to write chunks."""
        keys = [bytes(key) for key in job_metadata.keys]
        self._jobs.write(job_metadata.job_id, keys, self._addresses(job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to read chunks."""
        keys = [bytes(key) for key in job_metadata.keys]
        self._jobs.read(job_metadata.job_id, keys, self._addresses(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What ended since the last time; chunks that were not what was stored count as failed."""
        return [
            JobResult(
                job_id=done.number,
                success=done.is_whole,
                successful_keys=None if done.is_whole else list(done.good),
                transfer_time=done.seconds,
                transfer_bytes=done.num_bytes,
            )
            for done in self._jobs.take_finished()
        ]

    def has_pending_work(self) -> bool:
        """Whether a job runs."""
        return self._jobs.num_open > 0

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:  # noqa: ARG002
        """Chunks are taken one by one."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until nothing touches the host tier; StorageError after a minute."""
        if not self._jobs.drain(_DRAIN_SECONDS):
            raise StorageError(
                f"storage still works on the host tier after {_DRAIN_SECONDS} s: see to the "
                f"backend, and start the engine anew"
            )

    def shutdown(self) -> None:
        """End, at most some seconds later."""
        self._jobs.close(_CLOSE_SECONDS)


def _prefix(spec: Any) -> bytes:
    """What the bytes of a chunk depend on, beside what vLLM's own hash of it tells."""
    mapper = FileMapper.from_offloading_spec(
        root_dir="",
        offloading_spec=spec,
        blocks_per_file=spec.blocks_per_chunk,
        parallel_agnostic=False,
    )
    run = mapper.get_run_config()
    model = str(spec.config.model.name)
    told = json.dumps(
        [vllm_version, run, weights_revision(model, None, None)], sort_keys=True, default=str
    )
    return hashlib.blake2b(told.encode(), digest_size=16, person=b"kvferry chunks").digest()
