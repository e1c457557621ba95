"""Connectors for tests: the real one with one thing wrong, and a plain one to compare with."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvferry.adapters.vllm.connector import KVFerryConnector
from kvferry.types import SlotKind


class WrongBytes(KVFerryConnector):
    """Control: what was loaded is overwritten, and nobody is told. Outputs must differ."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load, then spoil the blocks."""
        super().start_load_kv(forward_context, **kwargs)
        for ticket in self._get_connector_metadata().tickets.values():
            for cache in self._registered.values():
                each = cache.shape[0] // self._num_blocks
                for block in (block for page in ticket.blocks_of_page for block in page):
                    cache[block * each : (block + 1) * each] = 0


class BadHostPages(KVFerryConnector):
    """Bits flip in host memory: in every load, the second page has all its signs turned."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Flip, then load."""
        meta = self._get_connector_metadata()
        pool = self.worker._pools[SlotKind.PAGE]
        for command in meta.commands:
            if getattr(command, "job", -1) in meta.tickets and len(command.host_slots) > 1:
                with pool.slot_view(command.host_slots[1]) as page:
                    page[3::4] = bytes(byte ^ 0x80 for byte in page[3::4])
        super().start_load_kv(forward_context, **kwargs)


class _Plan(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self) -> None:
        self.loads: list[tuple[tuple[str, str], int]] = []
        self.stores: list[tuple[str, int]] = []


class PlainReference(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Blocks in a dictionary, copied at once: what any cache with the same hits must come to.

    The scheduler's side keeps the keys, and each worker its own blocks, as they may be processes of
    their own. With ``folder`` the first rank writes its blocks there too, and every engine that is
    started with the folder has them.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self._running: dict[str, tuple[Any, list[int]]] = {}
        self._plan = _Plan()
        told = vllm_config.kv_transfer_config.kv_connector_extra_config.get("folder")
        self._folder = Path(told) if told else None
        kept = sorted(self._folder.glob("*.pt")) if self._folder else []
        self._known: set[str] = {path.stem for path in kept}
        self._blocks: dict[str, list[Any]] = {path.stem: torch.load(path) for path in kept}
        self._caches: list[Any] = []
        self._loaded: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        for (name, key), block in self._get_connector_metadata().loads:
            for cache, kept in zip(self._caches, self._blocks[key], strict=True):
                cache[block] = kept
            self._loaded.add(name)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        for key, block in self._get_connector_metadata().stores:
            if key not in self._blocks:
                self._blocks[key] = [cache[block].clone() for cache in self._caches]
                if self._folder and not get_tensor_model_parallel_rank():
                    torch.save(self._blocks[key], self._folder / f"{key}.pt")

    def get_finished(self, _: set[str]) -> tuple[None, set[str]]:
        loaded, self._loaded = self._loaded, set()
        return None, loaded

    def _key(self, request: Any, block: int) -> str:
        told = repr(list(request.all_token_ids[: (block + 1) * self._size]))
        return hashlib.sha256(told.encode()).hexdigest()

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        first, end = num_computed // self._size, num_computed // self._size
        while end < (request.num_tokens - 1) // self._size:
            if self._key(request, end) not in self._known:
                break
            end += 1
        found = (end - first) * self._size
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        (ids,) = blocks.get_block_ids()
        self._running[request.request_id] = (request, list(ids))
        name = request.request_id
        end = num_external // self._size
        self._plan.loads += [((name, self._key(request, at)), ids[at]) for at in range(end)]

    def build_connector_meta(self, output: Any) -> _Plan:
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            if cached.new_block_ids[at] is not None:
                self._running[name][1].extend(cached.new_block_ids[at][0])
        done = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        done |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in output.num_scheduled_tokens.items():
            request, ids = self._running[name]
            whole = min(done[name] + count, request.num_tokens) // self._size
            first = done[name] // self._size
            stores = [(self._key(request, at), ids[at]) for at in range(first, whole)]
            self._plan.stores += stores
            self._known.update(key for key, _ in stores)
        plan, self._plan = self._plan, _Plan()
        return plan

    def request_finished_all_groups(self, request: Any, _: Any) -> tuple[bool, None]:
        self._running.pop(request.request_id, None)
        return False, None
