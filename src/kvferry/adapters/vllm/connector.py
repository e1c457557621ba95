"""The connector as vLLM calls it. All that differs between versions of vLLM is in this file."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch
from vllm import __version__ as vllm_version
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry.adapters.vllm.block_events import BlocksKept
from kvferry.adapters.vllm.identity import weights_revision
from kvferry.adapters.vllm.messages import RankHandshake, RankReport, StepMetadata
from kvferry.adapters.vllm.pools import BlockGroup
from kvferry.adapters.vllm.scheduler_side import SchedulerSide
from kvferry.adapters.vllm.stats import FerryPromMetrics, FerryStats
from kvferry.adapters.vllm.worker_side import WorkerSide
from kvferry.cache import resolved_config
from kvferry.errors import CacheError, ConfigError
from kvferry.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["KVFerryConnector"]

KVConnectorMetadata.register(StepMetadata)
KVConnectorWorkerMetadata.register(RankReport)
KVConnectorHandshakeMetadata.register(RankHandshake)

_SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.STORAGE: CacheHitSource.DISK}
_OWN_KEY = "vllm"
_OWN_SETTINGS = {"layerwise": False}


class KVFerryConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """kvferry's tiered cache behind vLLM's scheduler and workers.

    ``kv_connector_extra_config`` has the sections of kvferry's config, and ``vllm``, a section of
    this connector: ``layerwise`` (False) lets a step begin with its loads, layer by layer, where by
    default a request waits until its load is over and verified.

    It is no `SupportsHMA`: in a model with several KV cache groups, vLLM (0.32) ends where blocks
    are told as lost. So vLLM makes one group of such a model's layers, where it can.

    Raises ConfigError for a model, a parallel layout or a setting that cannot be served.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        sections = dict(transfer.kv_connector_extra_config)
        between_steps = not _own_settings(sections.pop(_OWN_KEY, {}))["layerwise"]
        if not between_steps and getattr(vllm_config.scheduler_config, "async_scheduling", False):
            raise ConfigError(
                "vllm.layerwise is on together with asynchronous scheduling, where the next step "
                "begins before a load is known to be good: turn one of them off"
            )
        config = resolved_config(None, sections)
        if config.control.socket is not None:
            raise ConfigError(
                f"control.socket is {config.control.socket}, and the two halves of a cache in vLLM "
                f"take no orders: leave it out"
            )
        parallel = vllm_config.parallel_config
        _check_parallel(parallel)
        ranks = int(parallel.tensor_parallel_size)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        groups = _block_groups(kv_cache_config)
        replicated = all(_is_latent(spec) for spec in specs)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._registered: dict[str, Any] = {}
        self._results: tuple[set[str], set[int]] = (set(), set())
        if role is KVConnectorRole.SCHEDULER:
            shard = "" if replicated or ranks == 1 else f"tp{ranks}"
            events = getattr(vllm_config, "kv_events_config", None)
            hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
            self._scheduler = SchedulerSide(
                config,
                _namespace(vllm_config, shard),
                between_steps=between_steps,
                tells_events=bool(events and events.enable_kv_cache_events),
                hash_tokens=int(hash_tokens or groups[0].block_size),
            )
        else:
            self._worker = WorkerSide(
                config,
                groups,
                rank=_tensor_rank() if ranks > 1 else 0,
                num_ranks=ranks,
                replicated=replicated,
                between_steps=between_steps,
            )

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler's side; only in its role."""
        if self._scheduler is None:
            raise CacheError("this connector has the role of a worker: ask the scheduler's")
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        """The worker's side; only in its role."""
        if self._worker is None:
            raise CacheError("this connector has the role of the scheduler: ask a worker's")
        return self._worker

    # ---------------------------------------------------------------- what vLLM asks of the class

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache may lose what it was given."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether layers wait in Python, which a whole captured graph would skip."""
        return bool(_own_settings(extra_config.get(_OWN_KEY, {}))["layerwise"])

    # ---------------------------------------------------------------- the worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Make pools for the engine's tensors."""
        self._registered = dict(kv_caches)
        first = next(iter(kv_caches.values()))
        self.worker.register(kv_caches, self._num_blocks, _origin(first))

    def unregister_kv_caches(self) -> None:
        """Sleep mode takes the tensors away."""
        self.worker.let_go()

    def restore_kv_caches(self, kv_caches: dict[str, Any] | None = None) -> None:
        """Sleep mode brought the tensors back."""
        self.register_kv_caches(self._registered if kv_caches is None else kv_caches)

    def get_handshake_metadata(self) -> RankHandshake | None:
        """What the scheduler's side must know of this worker."""
        return self.worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:  # noqa: ARG002
        """Blocks may be written to anew in this step."""
        self.worker.order_after_stores()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Start the loads of this step."""
        self.worker.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Order the computation of a layer after its load."""
        self.worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: stores begin when the whole step has been submitted."""

    def wait_for_save(self) -> None:
        """Start the stores of this step."""
        self.worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Requests whose loads are over."""
        self._results = self.worker.results()
        return None, self._results[0] or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that do not hold what was promised."""
        return self._results[1]

    def build_connector_worker_meta(self) -> RankReport | None:
        """What this worker did, for the scheduler's side."""
        return self.worker.report()

    # ---------------------------------------------------------------- the scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, RankHandshake]) -> None:
        """All workers have registered their KV caches."""
        self.scheduler.start([metadata[rank] for rank in sorted(metadata)])

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What can be loaded behind what vLLM has."""
        return self.scheduler.look_up(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request has its blocks."""
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the workers are to do in this step."""
        side, counts = self.scheduler, scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            side.new_blocks(new.req_id, new.block_ids, replaces=True)
            side.scheduled(new.req_id, new.num_computed_tokens, counts[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            resumed = request_id in cached.resumed_req_ids
            side.new_blocks(request_id, cached.new_block_ids[at], replaces=resumed)
            side.scheduled(request_id, cached.num_computed_tokens[at], counts[request_id])
        return side.take_step()

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers did in a step."""
        self.scheduler.take_report(connector_output.kv_connector_worker_meta)

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks may go at once."""
        self.scheduler.finished(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether vLLM should go on stepping although no request runs."""
        return self.scheduler.has_work

    def reset_cache(self) -> bool:
        """Forget everything."""
        self.scheduler.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        """Events for routers, by vLLM's block hashes."""
        for told in self.scheduler.take_events():
            hashes = [maybe_convert_block_hash(one) for one in told.hashes]
            if isinstance(told, BlocksKept):
                yield BlockStored(
                    block_hashes=hashes,
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=0,
                    lora_id=None,
                    medium=told.medium,
                    lora_name=None,
                )
            else:
                yield BlockRemoved(block_hashes=hashes, medium=told.medium)

    # ---------------------------------------------------------------- figures

    def get_kv_connector_stats(self) -> FerryStats | None:
        """What happened since the last time; the scheduler's side knows all of it."""
        if self._scheduler is None:
            return None
        counts = self._scheduler.counts.take()
        return FerryStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        """Stats from what was sent to another process."""
        return FerryStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FerryPromMetrics:
        """Counters at vLLM's own endpoint."""
        return FerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """From which tier the tokens of a load come."""
        by_tier = self.scheduler.tokens_by_tier(request, num_external_tokens)
        return {_SOURCES[tier]: tokens for tier, tokens in by_tier.items()}

    def shutdown(self) -> None:
        """The engine ends."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()


def _own_settings(given: Any) -> dict[str, bool]:
    if not isinstance(given, dict) or not set(given) <= set(_OWN_SETTINGS):
        raise ConfigError(
            f"section vllm is {given!r}; it is a table with: {', '.join(_OWN_SETTINGS)}"
        )
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ConfigError(f"vllm.{name} is {value!r}; it must be true or false")
    return {**_OWN_SETTINGS, **given}


def _check_parallel(parallel: Any) -> None:
    for what in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, what, 1)
        if size > 1:
            raise ConfigError(
                f"{what} is {size}: this connector serves tensor parallel ranks only; set it to 1"
            )


def _is_latent(spec: Any) -> bool:
    inner = getattr(spec, "kv_cache_specs", None)
    return all(isinstance(one, MLAAttentionSpec) for one in (inner.values() if inner else (spec,)))


def _block_groups(kv_cache_config: Any) -> list[BlockGroup]:
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        inner = getattr(spec, "kv_cache_specs", None)
        for one in inner.values() if inner else (spec,):
            if not isinstance(one, FullAttentionSpec):
                raise ConfigError(
                    f"KV cache group {index} is of {type(one).__name__}, and only attention over "
                    f"all tokens is carried; leave --no-disable-hybrid-kv-cache-manager out, and "
                    f"vLLM keeps all tokens of sliding windows; recurrent states cannot be carried"
                )
        groups.append(BlockGroup(index, tuple(group.layer_names), int(spec.block_size)))
    if len(groups) > 1:
        raise ConfigError(
            f"this model has {len(groups)} KV cache groups, and vLLM takes word of pages that could"
            f" not be loaded for models with one only; serve it without this connector"
        )
    return groups


def _tensor_rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _namespace(vllm_config: Any, shard: str) -> dict[str, str]:
    model = vllm_config.model_config
    commit = getattr(model.hf_config, "_commit_hash", None)
    return {
        "model": str(model.model),
        "revision": f"{weights_revision(str(model.model), model.revision, commit)} "
        f"{model.compute_hash()}",
        "dtype": f"{model.dtype} {vllm_config.cache_config.cache_dtype}",
        "shard": shard,
    }


def _origin(tensor: Any) -> list[str]:
    """Who wrote the bytes of a block: another kernel may have put them in another order."""
    if tensor.device.type == "cpu":
        device = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    else:
        device = str(torch.cuda.get_device_capability(tensor.device))
    return [f"vllm {vllm_version}", tensor.device.type, device]
